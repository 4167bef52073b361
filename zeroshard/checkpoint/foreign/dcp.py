"""Opens a plain checkpoint of `torch.distributed.checkpoint`, as FSDP2 and torchtitan save them.

    DIR/.metadata        a pickle: shapes and rectangles of each tensor, and the place of each rectangle
    DIR/__R_N.distcp     rectangles and objects one after the other, each a whole archive of `torch.save`

The paths of keys in the nested dict that was saved tell parameters from optimizer state:

    ("model", NAME)                        or (NAME,)                        a parameter or buffer
    ("optim", "state", NAME, "exp_avg")    or ("optimizer", "state.NAME.exp_avg")
    ("optim", "param_groups", 0, "lr")     or ("optimizer", "param_groups.NAME.lr")

The first form is that of `get_state_dict`, the second its flattened form, which torchtitan saves. All other keys
(train_state, lr_scheduler) go to the client state. A tensor without moments that equals one with moments bit for bit is
an alias of it, since DCP stores tied weights twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.foreign.contents import Contents, Group, Parameter, optimizer_name, plain
from zeroshard.checkpoint.foreign.inert import Inert, shape_of
from zeroshard.checkpoint.foreign.stored import FileRange, Lazy, StoredTensor, Tile, Tiled, numel
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.checkpoint.foreign.unpickle import Limits, unpickle
from zeroshard.checkpoint.jsonfile import read_bytes
from zeroshard.checkpoint.manifest import check_name
from zeroshard.errors import CheckpointError

METADATA = ".metadata"


@dataclass(frozen=True)
class Archived:
    """A tensor in its own archive, which is opened by reads."""

    archive: FileRange
    shape: tuple[int, ...]
    dtype: torch.dtype

    def _open(self) -> StoredTensor:
        tensor = load(self.archive)
        if not isinstance(tensor, StoredTensor) or tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise CheckpointError(
                f"{self.archive.path}: at byte {self.archive.start} there is no {self.dtype} tensor of shape "
                f"{list(self.shape)}, as the metadata says"
            )
        return tensor

    def read(self) -> torch.Tensor:
        return self._open().read()

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        return self._open().read_flat(start, stop)


@dataclass
class SortedKeys:
    """The keys of a checkpoint by kind: tensors, other objects, moments, and options of optimizer groups."""

    tensors: dict[tuple[Any, ...], Lazy] = field(default_factory=dict)
    objects: dict[tuple[Any, ...], FileRange] = field(default_factory=dict)
    moments: dict[str, dict[str, Lazy]] = field(default_factory=dict)
    options: dict[tuple[Any, ...], FileRange] = field(default_factory=dict)


def is_dcp(directory: str | os.PathLike[str]) -> bool:
    return (Path(directory) / METADATA).is_file()


def open_dcp(directory: str | os.PathLike[str]) -> Contents:
    """The contents of a DCP folder; reads shapes, counters, options, and tensors that may be tied.

    Raises:
        CheckpointError: it is damaged, malicious, or compressed.
    """
    folder = Path(directory)
    found = _sort(folder)
    left_out: list[str] = []
    prefix = _model_prefix(found)
    values = {check_name(str(path[-1])): tensor for path, tensor in found.tensors.items() if path[:-1] == prefix}
    missing = sorted(set(found.moments) - set(values))
    if missing:
        raise CheckpointError(f"{folder}: the optimizer has moments of {missing[0]!r}, which the model does not have")
    parameters: dict[str, Parameter] = {}
    buffers: dict[str, Lazy] = {}
    aliases = _aliases(values, found.moments)
    for name, tensor in values.items():
        if name in found.moments:
            moments = dict(found.moments[name])
            step = moments.pop("step", None)
            kept = {key: moment for key, moment in moments.items() if moment.shape == tensor.shape}
            left_out += [f"{key} of {name}: it is no moment" for key in moments if key not in kept]
            parameters[name] = Parameter(name, tensor, kept, None if step is None else float(step.read().item()))
        elif name not in aliases and tensor.dtype.is_floating_point:
            parameters[name] = Parameter(name, tensor, trainable=bool(not found.moments))
        elif name not in aliases:
            buffers[name] = tensor
    rest = {path: tensor for path, tensor in found.tensors.items() if path[:-1] != prefix}
    client = _client_state(rest, found.objects, left_out)
    steps = _steps(parameters, client)
    groups = _groups(found.options, left_out)
    return Contents(
        origin=f"torch.distributed.checkpoint of {len(values)} tensors",
        parameters=parameters,
        buffers=buffers,
        aliases=aliases,
        groups=groups,
        optimizer=optimizer_name(groups, {key for parameter in parameters.values() for key in parameter.moments}),
        steps=steps,
        scheduler=client.pop("lr_scheduler", None),
        client_state=client,
        left_out=tuple(left_out),
    )


def _sort(folder: Path) -> SortedKeys:
    path = folder / METADATA
    metadata = unpickle(read_bytes(path, Limits().pickle_bytes), str(path))
    entries = _attribute(metadata, "state_dict_metadata", path)
    storage = _attribute(metadata, "storage_data", path)
    places = metadata.attribute("planner_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint")
    where = _places(folder, storage)
    found = SortedKeys()
    for key, entry in entries.items():
        place = places.get(key) if isinstance(places, dict) else None
        _add_entry(
            found, tuple(place) if isinstance(place, (tuple, list)) and place else (key,), key, entry, where, path
        )
    return found


def _attribute(value: Any, key: str, path: Path) -> Any:
    found = value.attribute(key) if isinstance(value, Inert) else None
    if found is None:
        raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint: it has no {key}")
    return found


Places = Mapping[tuple[str, tuple[int, ...] | None], FileRange]


def _places(folder: Path, storage: Mapping[Any, Any]) -> Places:
    """The places of rectangles, by key and offset."""
    found: dict[tuple[str, tuple[int, ...] | None], FileRange] = {}
    sizes: dict[str, int] = {}
    for index, info in storage.items():
        if not isinstance(index, Inert) or not isinstance(info, Inert):
            raise CheckpointError(f"{folder / METADATA}: an entry of its storage is none")
        key, offset = index.attribute("fqn"), index.attribute("offset")
        name, start, length = info.attribute("relative_path"), info.attribute("offset"), info.attribute("length")
        if info.attribute("transform_descriptors"):
            raise CheckpointError(
                f"{folder}: {key!r} is compressed or encrypted; such DCP checkpoints are not imported"
            )
        if not isinstance(name, str) or "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name:
            raise CheckpointError(f"{folder / METADATA} names a file {str(name)[:80]!r} outside of its folder; refused")
        if not isinstance(key, str) or type(start) is not int or type(length) is not int:
            raise CheckpointError(f"{folder / METADATA}: an entry of its storage is damaged")
        if name not in sizes:
            file = folder / name
            if file.is_symlink() or not file.is_file():
                raise CheckpointError(f"{file} is missing, or no plain file")
            sizes[name] = file.stat().st_size
        whole = FileRange(folder / name, 0, sizes[name])
        found[key, None if offset is None else shape_of(offset)] = whole.part(start, length)
    return found


def _add_entry(found: SortedKeys, place: tuple[Any, ...], key: str, entry: Any, where: Places, path: Path) -> None:
    if not isinstance(entry, Inert) or not isinstance(key, str):
        raise CheckpointError(f"{path}: an entry is no description of a tensor")
    moment = _moment(place)
    if entry.of.name == "BytesStorageMetadata":
        stored = where.get((key, None))
        if stored is None:
            raise CheckpointError(f"{path}: {key!r} is nowhere in the files")
        (found.options if _option(place) else found.objects)[place] = stored
        return
    tensor = _tensor(key, entry, where, path)
    if moment is None:
        found.tensors[place] = tensor
    else:
        name, kind = moment
        found.moments.setdefault(check_name(name), {})[kind] = tensor


def _tensor(key: str, entry: Inert, where: Places, path: Path) -> Lazy:
    properties, chunks = entry.attribute("properties"), entry.attribute("chunks")
    state = properties.state if isinstance(properties, Inert) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if dtype is None and isinstance(state, dict):
        dtype = state.get("dtype")
    if not isinstance(dtype, torch.dtype) or not isinstance(chunks, list):
        raise CheckpointError(f"{path}: {key!r} is described as no tensor")
    shape = shape_of(entry.attribute("size"))
    tiles = []
    for chunk in chunks:
        if not isinstance(chunk, Inert):
            raise CheckpointError(f"{path}: {key!r} is damaged")
        offsets, sizes = shape_of(chunk.attribute("offsets")), shape_of(chunk.attribute("sizes"))
        stored = where.get((key, offsets)) or (where.get((key, None)) if not any(offsets) else None)
        if stored is None:
            raise CheckpointError(f"{path}: the part of {key!r} at {list(offsets)} is nowhere in the files")
        if numel(sizes) * dtype.itemsize > stored.length:
            raise CheckpointError(f"{path}: the part of {key!r} at {list(offsets)} is larger than its file; refused")
        tiles.append(Tile(offsets, Archived(stored, sizes, dtype)))
    try:
        return Tiled(shape, tuple(tiles), dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {key!r}: {error}") from error


def _moment(place: Sequence[Any]) -> tuple[str, str] | None:
    """(parameter, kind) of optimizer state."""
    if len(place) >= 3 and place[-3] == "state":
        return str(place[-2]), str(place[-1])
    last = str(place[-1])
    if last.startswith("state.") and last.count(".") >= 2:
        name, kind = last.removeprefix("state.").rsplit(".", 1)
        return name, kind
    return None


def _option(place: Sequence[Any]) -> bool:
    return (len(place) >= 3 and place[-3] == "param_groups") or str(place[-1]).startswith("param_groups.")


def _model_prefix(found: SortedKeys) -> tuple[Any, ...]:
    """The key that the model was saved under: one with all names that have moments, else "model", else the largest."""
    prefixes: dict[tuple[Any, ...], set[str]] = {}
    for path in found.tensors:
        prefixes.setdefault(path[:-1], set()).add(str(path[-1]))
    if not prefixes:
        raise CheckpointError("the checkpoint holds no tensors")

    def rank(prefix: tuple[Any, ...]) -> tuple[bool, bool, int]:
        usual = bool(prefix) and str(prefix[-1]) == "model"
        holds = bool(found.moments) and set(found.moments) <= prefixes[prefix]
        return holds, usual, len(prefixes[prefix])

    return max(prefixes, key=rank)


def _aliases(values: Mapping[str, Lazy], moments: Mapping[str, Any]) -> dict[str, str]:
    """Matrices without moments that equal one with moments, with the name of that."""
    found = {}
    for name, tensor in values.items():
        if name in moments or len(tensor.shape) < 2 or not numel(tensor.shape):
            continue
        for other in moments:
            tied = values[other]
            if tied.shape == tensor.shape and tied.dtype == tensor.dtype and torch.equal(tied.read(), tensor.read()):
                found[name] = other
                break
    return found


def _object(archive: FileRange, where: str, left_out: list[str]) -> Any:
    return plain(load(archive), where, left_out)


def _groups(options: Mapping[tuple[Any, ...], FileRange], left_out: list[str]) -> tuple[Group, ...]:
    numbered: dict[Any, dict[str, Any]] = {}
    named: dict[str, dict[str, Any]] = {}
    for place, archive in options.items():
        value = _object(archive, ".".join(map(str, place)), left_out)
        *above, last = place
        if len(above) >= 2 and above[-2] == "param_groups":
            numbered.setdefault(above[-1], {})[str(last)] = value
        else:
            name, key = str(last).removeprefix("param_groups.").rsplit(".", 1)
            named.setdefault(check_name(name), {})[key] = value
    groups = []
    for values in numbered.values():
        names = values.pop("params", None)
        groups.append(Group(tuple(map(str, names or ())), values))
    together: dict[str, list[str]] = {}
    for name, values in named.items():
        together.setdefault(json.dumps(values, sort_keys=True), []).append(name)
    return (*groups, *(Group(tuple(names), json.loads(text)) for text, names in together.items()))


def _client_state(
    tensors: Mapping[tuple[Any, ...], Lazy], objects: Mapping[tuple[Any, ...], FileRange], left_out: list[str]
) -> dict[str, Any]:
    client: dict[str, Any] = {}
    for place, tensor in tensors.items():
        where = ".".join(map(str, place))
        if numel(tensor.shape) == 1:
            _put(client, place, plain(tensor.read().item(), where, left_out))
        else:
            left_out.append(f"{where}: a tensor outside of model and optimizer")
    for place, archive in objects.items():
        _put(client, place, _object(archive, ".".join(map(str, place)), left_out))
    return client


def _put(target: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        inner = target.setdefault(str(key), {})
        if not isinstance(inner, dict):
            raise CheckpointError(f"key {place!r} lies inside of a value")
        target = inner
    target[str(place[-1])] = value


def _steps(parameters: Mapping[str, Parameter], client: Mapping[str, Any]) -> int:
    """The number of steps: torchtitan's count, else the number of updates."""
    said = client.get("train_state")
    if isinstance(said, dict) and type(said.get("step")) is int:
        return said["step"]
    return int(max((parameter.step or 0 for parameter in parameters.values()), default=0))

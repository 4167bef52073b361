"""Our own checkpoints as `Contents`, and `Contents` as our own checkpoints.

The first is what `export` reads, the second what `import` writes: one rank's files, which any number of ranks loads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import directory, jsonfile
from zeroshard.checkpoint.foreign.contents import Contents, Group, Parameter, Scaler
from zeroshard.checkpoint.foreign.stored import Held, InMemory, Lazy, StoredTensor, numel
from zeroshard.checkpoint.manifest import MANIFEST, Manifest, TensorInfo, TensorKind
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.writer import Piece, join_tables, write_pieces
from zeroshard.errors import CheckpointError

Progress = Callable[[int], None]
_STEP = "step"


def find_own(base: Path, tag: str | None) -> Path | None:
    """The folder of one of our checkpoints: `base` itself or in it; None if there is none.

    Raises:
        CheckpointError: `tag` is no plain name.
    """
    if tag is None and (base / MANIFEST).is_file():
        return base
    if tag is not None:
        directory.check_tag(tag)
    there = {found.tag for found in directory.whole(base)}
    return directory.find(base, tag) if (tag in there if tag is not None else there) else None


def open_own(folder: Path) -> Contents:
    """The contents of one of our checkpoints. Raises CheckpointError."""
    reader = CheckpointReader(folder)
    moments: dict[str, dict[str, Lazy]] = {}
    for name in reader.names(TensorKind.OPTIMIZER):
        tensor = reader.tensor(name)
        moments.setdefault(tensor.info.of, {})[tensor.info.key] = tensor
    parameters: dict[str, Parameter] = {}
    for name in reader.names(TensorKind.PARAMETER):
        tensor = reader.tensor(name)
        own = {key: value for key, value in moments.get(name, {}).items() if value.shape == tensor.shape}
        step = moments.get(name, {}).get(_STEP)
        parameters[name] = Parameter(
            name,
            tensor,
            own,
            None if step is None or numel(step.shape) != 1 else float(step.read().item()),
            tensor.info.trainable,
            tensor.info.compute,
        )
    state = reader.state
    ranks = len({name.split(".")[1] for name in reader.names(TensorKind.RANK_BUFFER)})
    return Contents(
        origin=f"zeroshard, {reader.manifest.world_size} ranks",
        parameters=parameters,
        buffers={name: reader.tensor(name) for name in reader.names(TensorKind.BUFFER)},
        aliases=reader.aliases,
        groups=_groups(state),
        steps=int(state.get("global_steps") or 0),
        skipped=int(state.get("skipped_steps") or 0),
        scheduler=state.get("scheduler"),
        client_state=state.get("client_state") or {},
        left_out=(f"buffers that {ranks} ranks had other values of; rank 0's are taken",) if ranks else (),
    )


def _groups(state: Mapping[str, Any]) -> tuple[Group, ...]:
    return tuple(
        Group(tuple(group.get("params", ())), {key: value for key, value in group.items() if key != "params"})
        for group in state.get("groups") or ()
    )


def write_own(contents: Contents, base: str | os.PathLike[str], tag: str, progress: Progress = lambda n: None) -> Path:
    """Write a checkpoint that `load_checkpoint` reads, at any world size; returns its folder.

    Raises:
        CheckpointError: something can't be read or written; a checkpoint of that name is still what it was.
    """
    directory.check_tag(tag)
    where = Path(base)
    folder: Path | None = None
    try:
        folder = directory.begin(where, tag)
        write_pieces(folder, 0, _pieces(contents, progress), {})
        manifest: Manifest = join_tables(folder, 1, contents.aliases, jsonfile.as_read(state_of(contents)))
        directory.write_synced(folder / MANIFEST, manifest.encode())
        return directory.publish(where, tag, latest=True)
    except OSError as error:
        raise CheckpointError(f"{where / tag} can't be written: {error}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def state_of(contents: Contents) -> dict[str, Any]:
    """What our checkpoints keep beside tensors."""
    return {
        "client_state": contents.client_state,
        "global_steps": contents.steps,
        "skipped_steps": contents.skipped,
        "micro_steps": 0,
        "scheduler": contents.scheduler,
        "groups": [{"params": list(group.names), **group.options} for group in contents.groups],
        "scaler": None if contents.scaler is None else scaler_state(contents.scaler),
    }


def scaler_state(scaler: Scaler) -> dict[str, float | int]:
    """As our loss scaler keeps itself."""
    return {
        "scale": scaler.scale,
        "good_steps": scaler.since_overflow or 0,
        "hysteresis_left": scaler.hysteresis or 1,
        "consecutive_skips": 0,
        "total_skips": 0,
    }


def _pieces(contents: Contents, progress: Progress) -> Iterator[Piece]:
    for name, parameter in contents.parameters.items():
        weight = parameter.weight
        yield _piece(
            TensorInfo(name, TensorKind.PARAMETER, weight.dtype, weight.shape, parameter.compute, parameter.trainable),
            weight,
            progress,
        )
    for name, buffer in contents.buffers.items():
        yield _piece(TensorInfo(name, TensorKind.BUFFER, buffer.dtype, buffer.shape), buffer, progress)
    for name, parameter in contents.parameters.items():
        kinds: dict[str, Lazy] = dict(parameter.moments)
        if parameter.step is not None:
            kinds[_STEP] = InMemory(torch.tensor(float(parameter.step)))
        for key, tensor in kinds.items():
            info = TensorInfo(f"state.{name}.{key}", TensorKind.OPTIMIZER, tensor.dtype, tensor.shape, of=name, key=key)
            yield _piece(info, tensor, progress)


def _piece(info: TensorInfo, tensor: Lazy, progress: Progress) -> Piece:
    if isinstance(tensor, StoredTensor) and not tensor.contiguous:
        tensor = Held(tensor)

    def read(start: int, stop: int) -> torch.Tensor:
        values = tensor.read_flat(start, stop)
        progress(values.nbytes)
        return values

    return Piece(info, 0, info.numel, read)

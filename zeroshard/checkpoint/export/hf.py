"""Writes weights for `from_pretrained`.

    OUT/model-00001-of-00003.safetensors ...   or model.safetensors, if one file is enough
    OUT/model.safetensors.index.json           which tensor is in which file
    OUT/config.json                            and small files beside a known config.json

or as pytorch_model.bin, in parts with an index if it is large, which `torch.load` reads.

Tied weights are written once. In safetensors they have one name, that of the checkpoint, and `from_pretrained` ties
them by the config; in the other format all names share the memory. Everything is written to a folder beside OUT that is
renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.export.folder import WEIGHTS, new_folder, refuse_occupied
from zeroshard.checkpoint.export.safetensors_stream import Progress, write
from zeroshard.checkpoint.export.torch_file import fill, reserve
from zeroshard.checkpoint.foreign.contents import Contents, Parameter
from zeroshard.checkpoint.foreign.stored import Cast, Lazy, numel
from zeroshard.errors import CheckpointError, UsageError

INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
CONFIG = "config.json"
# Small files that make a folder usable without the original model; they are copied if they are beside a known config.
_BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
)
_BESIDE_LIMIT = 64 << 20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Export:
    """What was written."""

    folder: Path
    files: tuple[str, ...]
    tensors: int
    parameters: int
    bytes: int
    dtype: str
    aliases: Mapping[str, str]
    config: bool


def parse_size(text: str | int) -> int:
    """Bytes of "5GB", "200MB", "1GiB" or a number. Raises UsageError."""
    if isinstance(text, int):
        return text
    units = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
    lower = text.strip().lower()
    for unit, factor in units.items():
        number = lower.removesuffix(unit)
        if number != lower and number.strip().isdigit() and int(number) > 0:
            return int(number) * factor
    if lower.isdigit() and int(lower) > 0:
        return int(lower)
    raise UsageError(f"size {text!r}: write a number of bytes, or something like 5GB or 200MB")


def weights_of(contents: Contents, dtype: torch.dtype | None = None, frozen: bool = True) -> dict[str, Lazy]:
    """Parameters and buffers of a state dict, by the names that they are stored under.

    Args:
        dtype: dtype of floating-point parameters; None for the forward's, or bf16 if that is not known.
        frozen: include parameters that were not trained.
    """
    found: dict[str, Lazy] = {}
    for name, parameter in contents.parameters.items():
        if frozen or parameter.trainable:
            found[name] = _cast(parameter, dtype)
    return {**found, **contents.buffers}


def _cast(parameter: Parameter, dtype: torch.dtype | None) -> Lazy:
    weight = parameter.weight
    if not weight.dtype.is_floating_point:
        return weight
    wanted = dtype or parameter.compute or (torch.bfloat16 if parameter.trainable else weight.dtype)
    return weight if weight.dtype == wanted else Cast(weight, wanted)


def total_bytes(tensors: Mapping[str, Lazy]) -> int:
    """Bytes of all tensors."""
    return sum(numel(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())


def export_hf(
    contents: Contents,
    out: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard: int = 5 * 10**9,
    config: Path | Mapping[str, Any] | None = None,
    frozen: bool = True,
    progress: Progress = lambda count: None,
    *,
    safe: bool = True,
    shared: bool = False,
) -> Export:
    """Write a folder that `from_pretrained` loads.

    Args:
        dtype: dtype of parameters; None for the forward's.
        max_shard: most bytes of a file; a larger tensor has its own file.
        config: a `config.json`, or its content; None if it is not known.
        frozen: include parameters that were not trained.
        progress: is called with the bytes written since its last call.
        safe: write safetensors, else files of torch.
        shared: OUT may have other files, and other processes may write the same content into it.

    Raises:
        CheckpointError: something can't be read or written; OUT is not made, or unchanged if it is shared.
        UsageError: OUT exists and is not empty; if it is shared, it has weights in another number of files.
    """
    target = Path(out)
    if not shared or target.is_file():
        refuse_occupied(target)
    tensors = weights_of(contents, dtype, frozen)
    if not tensors:
        raise CheckpointError(f"{contents.origin} holds no weights to export")
    shards = split(tensors, max_shard)
    files = _names(len(shards), safe)
    if shared:
        _refuse_others(target, {*files, INDEX if safe else TORCH_INDEX})
    with new_folder(target, shared=shared) as partial:
        if safe:
            _write_safe(partial, files, shards, progress)
        else:
            _write_torch(partial, files, shards, contents.aliases, progress)
        known = _write_config(partial, config, {tensor.dtype for tensor in tensors.values()})
    return Export(
        folder=target,
        files=files,
        tensors=len(tensors),
        parameters=sum(numel(tensor.shape) for tensor in tensors.values()),
        bytes=total_bytes(tensors),
        dtype=" ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})),
        aliases=dict(contents.aliases),
        config=known,
    )


def split(tensors: Mapping[str, Lazy], max_shard: int) -> list[dict[str, Lazy]]:
    """Distribute tensors, in order, to files of at most `max_shard` bytes."""
    shards: list[dict[str, Lazy]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = numel(tensor.shape) * tensor.dtype.itemsize
        if shards[-1] and filled + size > max_shard:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    return shards


def _names(count: int, safe: bool) -> tuple[str, ...]:
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    if count == 1:
        return (f"{stem}.{suffix}",)
    return tuple(f"{stem}-{number:05}-of-{count:05}.{suffix}" for number in range(1, count + 1))


def _refuse_others(target: Path, files: set[str]) -> None:
    """Raises UsageError for files of another export, since a folder with both could be read as either."""
    if not target.is_dir():
        return
    for path in sorted(target.iterdir()):
        weights = path.name.endswith((".safetensors", ".bin", ".index.json")) and path.name.startswith(WEIGHTS)
        if weights and path.name not in files:
            raise UsageError(f"{path} belongs to weights of another form or size; remove it, or name another folder")


def _write_safe(folder: Path, names: Sequence[str], shards: Sequence[dict[str, Lazy]], progress: Progress) -> None:
    for name, shard in zip(names, shards, strict=True):
        write(folder / name, shard, {"format": "pt"}, progress)
    _write_index(folder / INDEX, names, shards)


def _write_torch(
    folder: Path,
    names: Sequence[str],
    shards: Sequence[dict[str, Lazy]],
    aliases: Mapping[str, str],
    progress: Progress,
) -> None:
    held: list[dict[str, Lazy]] = []
    for name, shard in zip(names, shards, strict=True):
        others = {alias: stored for alias, stored in aliases.items() if stored in shard}
        places = reserve(folder / name, {key: (tensor.shape, tensor.dtype) for key, tensor in shard.items()}, others)
        fill(folder / name, ((places[key], tensor) for key, tensor in shard.items()), progress)
        held.append({**shard, **{alias: shard[stored] for alias, stored in others.items()}})
    if len(names) > 1:
        _write_index(folder / TORCH_INDEX, names, held)


def _write_index(path: Path, names: Sequence[str], shards: Sequence[dict[str, Lazy]]) -> None:
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    size = sum(total_bytes({str(id(tensor)): tensor for tensor in shard.values()}) for shard in shards)
    path.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2) + "\n")


def _write_config(folder: Path, config: Path | Mapping[str, Any] | None, dtypes: set[torch.dtype]) -> bool:
    if config is None:
        return False
    content = config
    if isinstance(config, Path):
        try:
            content = json.loads(config.read_text())
        except ValueError as error:
            raise CheckpointError(f"{config} is no JSON: {error}") from error
        for name in _BESIDE:
            file = config.parent / name
            if file.is_file() and file.stat().st_size <= _BESIDE_LIMIT:
                shutil.copyfile(file, folder / name)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{config} is no object of JSON")
    floating = sorted((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: dtype.itemsize)
    said = {key: str(floating[0]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in content}
    (folder / CONFIG).write_text(json.dumps({**content, **(said if floating else {})}, indent=2) + "\n")
    return True


def find_config(directory: Path) -> Path | None:
    """The config.json in a checkpoint's folder or in the folder around it; None if there is none."""
    for folder in (directory, directory.parent):
        if (folder / CONFIG).is_file():
            return folder / CONFIG
    return None

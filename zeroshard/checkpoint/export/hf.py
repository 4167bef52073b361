"""Write weights as `from_pretrained` reads them.

    OUT/model-00001-of-00003.safetensors ...   or model.safetensors, where one file is enough
    OUT/model.safetensors.index.json           which tensor is in which file
    OUT/config.json                            and what else lies beside a known one

Tied weights are written once, under the name that the checkpoint stores them under; the config's tie makes
`from_pretrained` tie them again. All goes to a folder beside OUT that is renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.export.folder import new_folder, refuse_occupied
from zeroshard.checkpoint.export.safetensors_stream import Progress, write
from zeroshard.checkpoint.foreign.contents import Contents, Parameter
from zeroshard.checkpoint.foreign.stored import Cast, Lazy, numel
from zeroshard.errors import CheckpointError, UsageError

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
# Small files that make a folder usable without the original model; copied if they lie beside a known config.
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
    """The tensors of a state dict under the names that they are stored under.

    Args:
        dtype: of floating-point parameters; None for what the forward computed in, bf16 where that is not known.
        frozen: with parameters that were not trained.
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
    return sum(numel(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())


def export_hf(
    contents: Contents,
    out: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard: int = 5 * 10**9,
    config: Path | Mapping[str, Any] | None = None,
    frozen: bool = True,
    progress: Progress = lambda count: None,
) -> Export:
    """Write a folder that `from_pretrained` loads.

    Args:
        dtype: of parameters; None for what the forward computed in.
        max_shard: bytes of a file; a larger tensor has a file of its own.
        config: a `config.json`, or its content; None if it is not known.

    Raises:
        CheckpointError: something can't be read or written; OUT is not there then.
        UsageError: OUT exists.
    """
    target = Path(out)
    refuse_occupied(target)
    tensors = weights_of(contents, dtype, frozen)
    if not tensors:
        raise CheckpointError(f"{contents.origin} holds no weights to export")
    with new_folder(target) as partial:
        files = _write_shards(partial, tensors, max_shard, progress)
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
    """Tensors in order, by file."""
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


def _write_shards(folder: Path, tensors: Mapping[str, Lazy], max_shard: int, progress: Progress) -> tuple[str, ...]:
    shards = split(tensors, max_shard)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        write(folder / name, shard, {"format": "pt"}, progress)
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total_bytes(tensors)}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return tuple(names)


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
    """A config.json that a trainer has put into the checkpoint's folder or beside it."""
    for folder in (directory, directory.parent):
        if (folder / CONFIG).is_file():
            return folder / CONFIG
    return None

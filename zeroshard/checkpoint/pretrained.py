"""Shards a pretrained model as it is read: each rank reads its own slices of the safetensors files only.

    file      | tensor ............................ |
    rank 0    [ read  )
    rank 1             [ read  )                          no rank has the whole tensor, and nothing is sent

Tensors that the files lack, such as those of a new head, are made by the constructor, one at a time. Rejected: one rank
that reads everything and broadcasts it, as transformers does under ZeRO-3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.checkpoint.safetensors_folder import SafetensorsFolder, StoredWeight
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.sharding.deferred.init import Init, fill_in_place, materialize
from zeroshard.sharding.unowned import even_parts, keep_shard, rest_unowned, shard_unowned
from zeroshard.sharding.unowned_guard import guard_unowned

_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})


@dataclass(frozen=True)
class Pretrained:
    """The result of `from_pretrained`.

    Attributes:
        model: its parameters are sharded over the default process group and empty, for `shard` and `initialize` or
            `GatheredParameters`; buffers are whole.
        made: names that the files lack; their values are the constructor's.
        unused: names in the files that the model lacks.
    """

    model: nn.Module
    made: tuple[str, ...]
    unused: tuple[str, ...]


def from_pretrained(
    build: Callable[[], nn.Module],
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    rename: Callable[[str], str] = str,
    new: Iterable[str] = (),
) -> Pretrained:
    """Build a model without memory and fill it from a folder of safetensors files, slice by slice.

    Called by all ranks with the same arguments, after the process group was initialized; without one the model is
    whole. It takes host memory for this rank's shards and one slice, or one tensor that the files lack.

    Args:
        build: makes the model, as `lambda: AutoModelForCausalLM.from_config(config)` does. dtype: of floating
        parameters; None keeps those of the constructor. Shards of tensors that are float32 in the files
            stay float32, so that master weights are exact.
        device: where shards rest. Default: the current accelerator, else the CPU.
        rename: maps a name in the model to the name in the files.
        new: prefixes of names that the files may lack.

    Raises:
        UsageError: `build` returns no model, or dtype is no floating-point dtype.
        CheckpointError: the files lack a parameter or persistent buffer that is not `new`, a shape differs, or they
            have another kind of number than the model: integers, complex ones or 8-bit floats for ordinary floats.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"from_pretrained(dtype={dtype!r}): a floating-point torch dtype, torch.bfloat16 say, or None")
    with Init(device=device):
        model = build()
    if not isinstance(model, nn.Module):
        raise UsageError(f"from_pretrained: build() gave {type(model).__name__}; it must return the model")
    with SafetensorsFolder(folder) as files:
        members = _members(model)
        stored = {name: files.weights.get(rename(name)) for name in members}
        for names in _aliases(model).values():  # tied: the files have one of the names
            known = next((stored[name] for name in names if stored.get(name) is not None), None)
            stored.update((name, known) for name in names)
        made = _check(members, stored, (new,) if isinstance(new, str) else tuple(new), files)

        def keep(name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
            if not isinstance(tensor, nn.Parameter):
                fill_in_place(name, tensor, value)
                return
            value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            fill_in_place(name, tensor, value.new_empty(0))
            shard_unowned(tensor, value, name)

        materialize(model, None, keep, wanted=lambda name: stored.get(name) is None)
        target = torch.device(device) if device is not None else _default_device()
        first = {id(tensor): name for name, tensor in reversed(members.items())}
        for name, tensor in members.items():
            weight = stored[name]
            if weight is not None and first[id(tensor)] == name:
                _fill(name, tensor, weight, files, dtype, target)
        guard_unowned(model)
        used = {weight.name for weight in stored.values() if weight is not None}
        return Pretrained(model, made, tuple(sorted(files.weights.keys() - used)))


def _members(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under all their names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: several for key, several in names.items() if len(several) > 1}


def _check(
    members: dict[str, torch.Tensor],
    stored: dict[str, StoredWeight | None],
    new: tuple[str, ...],
    files: SafetensorsFolder,
) -> tuple[str, ...]:
    """The names that the constructor makes. Raises CheckpointError for other missing names, shapes or dtypes."""
    for name, weight in stored.items():
        shape = tuple(members[name].shape)
        if weight is not None and weight.shape != shape:
            raise CheckpointError(f"{weight.file}: {weight.name!r} has shape {weight.shape}, the model's has {shape}")
        if weight is not None and not _converts(weight.dtype, members[name].dtype):
            raise CheckpointError(
                f"{weight.file}: {weight.name!r} is {weight.dtype}, the model's {name!r} is {members[name].dtype}, and "
                "its numbers alone don't say what they mean there (quantized weights need their scales). Convert the "
                "file to ordinary floats with the library that wrote it, or build the model with what it holds"
            )
    made = tuple(name for name, weight in stored.items() if weight is None)
    lacking = [name for name in made if not name.startswith(new)]
    if lacking:
        some, known = ", ".join(lacking[:5]), ", ".join(sorted(files.weights)[:3])
        raise CheckpointError(
            f"{files.folder}: lacks {len(lacking)} of the model's tensors ({some} ...; it has {known} ...). Give "
            "`rename` if they are called otherwise there, or `new` with the beginnings of names that are to be made"
        )
    return made


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a dtype is converted to another: ordinary floats to each other, and integers to each other."""
    return stored == wanted or any(stored in kind and wanted in kind for kind in (_FLOATS, _INTEGERS))


def _fill(
    name: str,
    tensor: torch.Tensor,
    weight: StoredWeight,
    files: SafetensorsFolder,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Give a parameter this rank's slice as its shard, or a buffer all of its values."""
    if not isinstance(tensor, nn.Parameter):
        value = files.read(weight.name, 0, weight.numel).view(weight.shape)
        fill_in_place(name, tensor, value.to(device, tensor.dtype))
        return
    kind = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    parts, (start, end) = even_parts(weight.numel)
    own = files.read(weight.name, start, end)
    fill_in_place(name, tensor, torch.empty(0, dtype=kind, device=device))
    keep_shard(tensor, weight.shape, parts, own.to(device, own.dtype if own.dtype == torch.float32 else kind))
    rest_unowned(tensor, name)


def _default_device() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())

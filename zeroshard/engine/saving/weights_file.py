"""Writes the weights of a running sharded model to one file, without holding all weights on one rank.

All ranks gather one flat group after the other, and rank 0 writes each before the next. If a write fails rank 0 still
takes part in all gathers, so that the others do not wait for it; then all ranks raise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from zeroshard.checkpoint.error_barrier import on_all_ranks
from zeroshard.checkpoint.export.safetensors_stream import header, write_tensor
from zeroshard.checkpoint.export.torch_file import fill, reserve
from zeroshard.checkpoint.foreign.stored import InMemory, Lazy
from zeroshard.checkpoint.temporary_files import Owner, clear, delete
from zeroshard.engine.core.handle import Handle, handle_of
from zeroshard.engine.outside_step.gathered import iterate_full_parameters
from zeroshard.engine.saving.checkpoints import checked_directory, saver_of
from zeroshard.engine.saving.saved_model import persistent_buffers
from zeroshard.errors import CheckpointError, UsageError

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def save_16bit_model(model: nn.Module, folder: str | os.PathLike[str], filename: str, frozen: bool = True) -> Path:
    """Write parameters in compute dtype, and persistent buffers, to `folder/filename`; called by all ranks.

    Args:
        filename: of a safetensors file if it ends so, else of a file that `torch.load` reads. Tied weights are
            written once; in the second kind the other names are there too and share the memory.
        frozen: with parameters that are not trained.

    Raises:
        UsageError: `filename` is no plain name.
        CheckpointError: the file can't be written; what was there before is still there. On all ranks.
    """
    if not filename or Path(filename).name != filename:
        raise UsageError(f"save_16bit_model: {filename!r} is no file name; the folder is its own argument")
    handle = handle_of(model)
    if handle.comm.stages is not None:
        raise UsageError(
            "save_16bit_model of a pipeline: no rank sees the weights of all stages; save a checkpoint and write them "
            "from it: zeroshard checkpoint export"
        )
    target = checked_directory(folder) / filename
    weights = _weights(model, frozen)

    def part() -> None:
        try:
            if handle.comm.mesh.rank == 0:
                _write(handle, model, target, weights, frozen)
        except OSError as error:
            raise CheckpointError(f"{target} can't be written: {error}") from error
        finally:
            for _ in weights:  # the rest, if rank 0 stopped early; all of them, elsewhere
                pass

    on_all_ranks(saver_of(handle).barrier(), part, target)
    return target


def _write(handle: Handle, model: nn.Module, target: Path, weights: Iterator[tuple[str, Lazy]], frozen: bool) -> None:
    shapes = _shapes(handle, frozen)
    buffers: dict[str, Lazy] = {name: InMemory(buffer.cpu()) for name, buffer in persistent_buffers(model).items()}
    with closing(Owner(target.parent)) as owner:
        clear(target.parent)
        partial = owner.path(target.name)
        try:
            if target.suffix == ".safetensors":
                _write_safetensors(partial, shapes, buffers, weights)
            else:
                held = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()}
                aliases = {alias: name for alias, name in handle.plan.aliases.items() if name in shapes}
                places = reserve(partial, {**shapes, **held}, aliases)
                fill(partial, ((places[name], tensor) for name, tensor in weights))
                fill(partial, ((places[name], tensor) for name, tensor in buffers.items()))
            partial.replace(target)
        finally:
            delete(partial)


def _write_safetensors(
    path: Path, shapes: Shapes, buffers: dict[str, Lazy], weights: Iterator[tuple[str, Lazy]]
) -> None:
    described: dict[str, Lazy] = {
        name: InMemory(torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, dtype) in shapes.items()
    }
    with path.open("xb") as file:
        file.write(header({**described, **buffers}, {"format": "pt"}))
        for name, tensor in weights:
            assert described.pop(name).shape == tensor.shape
            write_tensor(file.write, tensor)
        for buffer in buffers.values():
            write_tensor(file.write, buffer)
        file.flush()
        os.fsync(file.fileno())


def _weights(model: nn.Module, frozen: bool) -> Iterator[tuple[str, Lazy]]:
    names = _shapes(handle_of(model), frozen)
    for name, tensor in iterate_full_parameters(model, master=False):
        if name in names:
            yield name, InMemory(tensor)


def _shapes(handle: Handle, frozen: bool) -> Shapes:
    """Of parameters, in the order in which they are gathered."""
    return {
        segment.name: (tuple(segment.whole_shape), group.dtype)
        for unit in handle.runtime.units
        for group in unit.groups
        if frozen or group.plan.trainable
        for segment in group.plan.layout.segments
    }

"""Reads zeroshard's checkpoints as `Contents`, for exports, and writes `Contents` as such checkpoints, for imports.

An imported checkpoint has the files of one rank, which any number of ranks can load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import directory, jsonfile
from zeroshard.checkpoint.draft import Draft, begin, write_manifest
from zeroshard.checkpoint.foreign.contents import Contents, Group, Parameter, Scaler
from zeroshard.checkpoint.foreign.stored import InMemory, Lazy, ReadWhole, StoredTensor, numel
from zeroshard.checkpoint.manifest import MANIFEST, TensorInfo, TensorKind, read_manifest
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.values import pack, unpack
from zeroshard.checkpoint.writer import Piece, join_tables, write_pieces
from zeroshard.errors import CheckpointError

Progress = Callable[[int], None]
_STEP = "step"
_HOW = frozenset(
    ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "bias_correction", "step")
)
_UNLESS_SET = frozenset(("amsgrad", "maximize"))


def find_native(base: Path, tag: str | None) -> Path | None:
    """The folder of a zeroshard checkpoint: `base` itself or one in it; None if there is none."""
    if tag is None and (base / MANIFEST).is_file():
        return base
    there = {found.tag for found in directory.whole(base)}
    return directory.find(base, tag) if (tag in there if tag is not None else there) else None


def open_native(folder: Path) -> Contents:
    """The contents of a zeroshard checkpoint. Raises CheckpointError if it is damaged."""
    try:
        return _contents(CheckpointReader(folder))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"{type(error).__name__} {error}"
        raise CheckpointError(f"{folder / MANIFEST}: its state is not what it must be: {what}") from error


def _contents(reader: CheckpointReader) -> Contents:
    moments: dict[str, dict[str, Lazy]] = {}
    kinds = (kind for kind in TensorKind if kind.of_optimizer)
    for name in (name for kind in kinds for name in reader.names(kind)):
        tensor = reader.tensor(name)
        moments.setdefault(tensor.info.of, {})[tensor.info.key] = tensor
    parameters: dict[str, Parameter] = {}
    for name in reader.names(TensorKind.PARAMETER):
        tensor = reader.tensor(name)
        state = moments.get(name, {})
        step = state.pop(_STEP, None)
        own = {key: value for key, value in state.items() if value.shape == tensor.shape and _is_moment(value)}
        parameters[name] = Parameter(
            name,
            tensor,
            own,
            None if step is None or numel(step.shape) != 1 else float(step.read().item()),
            tensor.info.trainable,
            tensor.info.compute,
        )
    state = reader.state
    counters, scheduler, optimizer = unpack(state["counters"]), state["scheduler"], state["optimizer"]
    ranks = len({name.split(".")[1] for name in reader.names(TensorKind.RANK_BUFFER)})
    return Contents(
        origin=f"zeroshard, {state.get('ranks', reader.manifest.world_size)} ranks",
        parameters=parameters,
        buffers={name: reader.tensor(name) for name in reader.names(TensorKind.BUFFER)},
        aliases=reader.aliases,
        groups=() if optimizer is None else tuple(map(_group, optimizer["groups"])),
        optimizer=None if optimizer is None else optimizer["type"],
        steps=int(counters.get("global_steps", 0)),
        skipped=int(counters.get("skipped_steps", 0)),
        accumulation=int(counters.get("accumulation", 1)),
        scheduler=None if scheduler is None else unpack(scheduler["state"]),
        scheduler_type=None if scheduler is None else scheduler["type"],
        complete=state.get("frozen") is not False,
        client_state=unpack(state["client_state"]),
        left_out=tuple(_left_out(ranks, moments)),
    )


def _left_out(ranks: int, state: Mapping[str, Mapping[str, Lazy]]) -> Iterator[str]:
    if ranks:
        yield f"buffers whose values differ on {ranks} ranks; rank 0's are taken"
    if any(key.endswith("_codes") for kept in state.values() for key in kept):
        yield "moments in 8 or 4 bits, which only the same optimizer of zeroshard reads; weights are taken"


def _is_moment(value: Lazy) -> bool:
    """Whether a state has a number per element; codes of 8-bit moments have the same shape, but are no moment."""
    return value.dtype.is_floating_point


def _group(saved: Mapping[str, Any]) -> Group:
    return Group(tuple(saved["names"]), {key: _listed(value) for key, value in unpack(saved["options"]).items()})


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def write_native(
    contents: Contents, base: str | os.PathLike[str], tag: str, progress: Progress = lambda n: None
) -> Path:
    """Write a checkpoint that `load_checkpoint` reads at any number of ranks; returns its folder.

    Args:
        progress: is called with the number of bytes read since its last call.

    Raises:
        CheckpointError: something can't be read or written; a checkpoint of that name is unchanged.
    """
    where = Path(base)
    draft: Draft | None = None
    try:
        draft = begin(where, tag)
        write_pieces(draft.folder, 0, _pieces(contents, progress), {})
        manifest = join_tables(draft.folder, 1, contents.aliases, jsonfile.as_read(state_of(contents)))
        write_manifest(draft, manifest)
        read_manifest(draft.folder)  # what could not be opened is not published
        return draft.publish(latest=True)
    except OSError as error:
        raise CheckpointError(f"{where / tag} can't be written: {error}") from error
    finally:
        if draft is not None:
            draft.close()


def state_of(contents: Contents) -> dict[str, Any]:
    """The state of a checkpoint besides tensors. A type that is not known is None, which matches any at a load."""
    groups = [
        {"names": list(group.names), "options": pack(_options(group.options), "optimizer options")}
        for group in contents.groups
    ]
    scheduler = {"type": contents.scheduler_type, "state": pack(contents.scheduler, "scheduler")}
    counters = {
        "micro_steps": contents.steps * contents.accumulation,
        "global_steps": contents.steps,
        "skipped_steps": contents.skipped,
        "accumulation": contents.accumulation,
    }
    return {
        "optimizer": {"type": contents.optimizer, "groups": groups, "counters": {}} if groups else None,
        "scaler": None if contents.scaler is None else scaler_state(contents.scaler),
        "scheduler": None if contents.scheduler is None else scheduler,
        "client_state": pack(contents.client_state, "client_state"),
        "counters": counters,
        "frozen": contents.complete,
        "ranks": 1,
    }


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters without options of torch's implementation; pairs such as betas are tuples."""
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in options.items()
        if key not in _HOW and not (key in _UNLESS_SET and not value)
    }


def scaler_state(scaler: Scaler) -> dict[str, float | int]:
    """The state of zeroshard's loss scaler."""
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
        for key, tensor in parameter.moments.items():
            info = TensorInfo(f"state.{name}.{key}", TensorKind.OPTIMIZER, tensor.dtype, tensor.shape, of=name, key=key)
            yield _piece(info, tensor, progress)
        if parameter.step is not None:
            scalar, step = TensorKind.OPTIMIZER_SCALAR, InMemory(torch.tensor(float(parameter.step)))
            yield _piece(
                TensorInfo(f"state.{name}.{_STEP}", scalar, step.dtype, (), of=name, key=_STEP), step, progress
            )


def _piece(info: TensorInfo, tensor: Lazy, progress: Progress) -> Piece:
    if isinstance(tensor, StoredTensor) and not tensor.contiguous:
        tensor = ReadWhole(tensor)

    def read(start: int, stop: int) -> torch.Tensor:
        values = tensor.read_flat(start, stop)
        progress(values.nbytes)
        return values

    return Piece(info, 0, info.numel, read)

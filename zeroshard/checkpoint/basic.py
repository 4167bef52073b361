"""A checkpoint per rank: enough to go on at the same world size and plan.

    DIR/latest                      name of the newest complete checkpoint
    DIR/TAG/rank-0003.safetensors   this rank's shards, master weights and optimizer state, by group
    DIR/TAG/state.json              plan, counters, what the caller adds, and a checksum of all that

A checkpoint is written into a temporary folder and renamed when every rank has finished, so a reader sees a whole one
or none; one that takes the place of another is renamed after that has become DIR/.TAG.old, where it is found too. Every
tensor has a checksum. A rank that fails makes all ranks fail, before anything is changed. Only safetensors and JSON:
loading runs no code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from zeroshard.engine.handle import Handle
from zeroshard.errors import CheckpointError
from zeroshard.optim.updates import StatefulUpdate
from zeroshard.plan.plan import Plan

LATEST = "latest"
STATE = "state.json"
FORMAT = 2
_CHECKSUMS = "crc32"
_OPTIMIZER = "optimizer."
T = TypeVar("T")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def save(
    handle: Handle, update: StatefulUpdate | None, directory: str | os.PathLike[str], tag: str, extra: Mapping[str, Any]
) -> Path:
    """Write a checkpoint; called by all ranks. `extra` must be JSON-able and is taken from rank 0.

    Raises:
        CheckpointError: the tag is no plain name, or `extra` can't be written as JSON.
    """
    check_tag(tag)
    base, rank = Path(directory), handle.comm.mesh.rank
    final, partial = base / tag, base / f".{tag}.partial"
    handle.runtime.drain()
    handle.check_members()

    def begin() -> str:
        text = _state_text(handle, update, extra, final)
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        return text

    def write(text: str) -> None:
        tensors = {name: value.detach().contiguous().cpu() for name, value in _tensors(handle, update).items()}
        checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
        save_file(tensors, _file(partial, rank), metadata={_CHECKSUMS: json.dumps(checksums)})
        if rank == 0:
            (partial / STATE).write_text(text)

    text = _together(handle, begin, final)
    _together(handle, lambda: write(text), final)
    _together(handle, lambda: _publish(base, partial, final) if rank == 0 else None, final)
    return final


def _state_text(handle: Handle, update: StatefulUpdate | None, extra: Mapping[str, Any], final: Path) -> str:
    state = {
        "format": FORMAT,
        "plan": json.loads(handle.plan.to_json()),
        "update": type(update).__name__,
        "counters": {} if update is None else update.counters(),
        "extra": extra,
    }
    try:
        state = json.loads(json.dumps(state))  # as it will be read: lists for tuples, strings for keys
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {final}: client state holds something that JSON can't: {error}") from error
    return json.dumps({"checksum": _text_checksum(state), **state}, indent=1)


Check = Callable[[Mapping[str, Any]], None]


def load(
    handle: Handle,
    update: StatefulUpdate | None,
    directory: str | os.PathLike[str],
    tag: str | None,
    check: Check = lambda extra: None,
) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint into the running state; called by all ranks. Returns its folder and `extra`.

    Args:
        tag: None for the newest.
        check: looks at `extra` before anything is changed; raises CheckpointError where it does not fit.

    Raises:
        CheckpointError: it is not there, damaged, or of another plan, on this rank or on another; nothing was changed.
    """

    def read() -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
        folder = find(directory, tag)
        state = _read_state(folder)
        _check_plan(handle.plan, state["plan"], folder)
        if state["update"] != type(update).__name__:
            raise CheckpointError(
                f"{folder} holds the optimizer state of a {state['update']}, this run needs that of a "
                f"{type(update).__name__}: it was saved with another optimizer, or on another kind of device"
            )
        check(state["extra"])
        file = _file(folder, handle.comm.mesh.rank)
        saved = _read_tensors(file)
        for name, tensor in _tensors(handle, update).items():
            optional = update is not None and update.lazy and name.startswith(_OPTIMIZER)
            if not (name in saved or optional) or saved.get(name, tensor).shape != tensor.shape:
                raise CheckpointError(f"{file}: tensor {name!r} is missing or of another shape")
        return folder, state, saved

    folder, state, saved = _together(handle, read, Path(directory))
    handle.runtime.parameters.before_write()
    with torch.no_grad():
        for name, tensor in _own_tensors(handle).items():
            tensor.copy_(saved[name])
    if update is not None:
        update.load_counters(state["counters"])
        update.load_tensors(
            {key.removeprefix(_OPTIMIZER): value for key, value in saved.items() if key.startswith(_OPTIMIZER)}
        )
    handle.runtime.clear_gradients()
    handle.runtime.parameters.written()
    return folder, state["extra"]


def find(directory: str | os.PathLike[str], tag: str | None) -> Path:
    """The folder of a checkpoint. Raises CheckpointError when there is none."""
    base = Path(directory)
    if tag is None:
        latest = base / LATEST
        if not latest.is_file():
            raise CheckpointError(f"{base} holds no finished checkpoint (there is no file {LATEST!r} in it)")
        tag = latest.read_text().strip()
    check_tag(tag)
    for folder in (base / tag, _old(base, tag)):
        if (folder / STATE).is_file():
            return folder
    raise CheckpointError(f"there is no checkpoint {tag!r} in {base} (no file {base / tag / STATE})")


def _old(base: Path, tag: str) -> Path:
    """Where a checkpoint is while another takes its place; it stays there if the process is killed just then."""
    return base / f".{tag}.old"


def check_tag(tag: str) -> None:
    """A tag becomes a folder's name, so it must be a plain one. Raises CheckpointError."""
    if not _TAG.fullmatch(tag):
        raise CheckpointError(f"checkpoint tag {tag!r}: use letters, digits, '.', '_' and '-' only")


def _publish(base: Path, partial: Path, final: Path) -> None:
    old = _old(base, final.name)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    pointer = base / f".{LATEST}.partial"
    pointer.write_text(final.name)
    pointer.replace(base / LATEST)
    shutil.rmtree(old, ignore_errors=True)


def _together(handle: Handle, work: Callable[[], T], where: Path) -> T:
    """Run `work` on all ranks; returns what it gave here if it succeeded everywhere, so it is a barrier too.

    Raises:
        CheckpointError: it failed here, or on another rank.
    """
    done: list[T] = []
    problem: Exception | None = None
    try:
        done.append(work())
    except (CheckpointError, OSError, SafetensorError) as error:
        problem = error
    control = handle.comm.control
    failed = torch.tensor([control.size if done else control.rank], dtype=torch.int64, device=handle.device)
    control.wait(control.all_reduce(failed, "(checkpoint)", op=torch.distributed.ReduceOp.MIN))
    if isinstance(problem, CheckpointError):
        raise problem
    if problem is not None:
        raise CheckpointError(f"checkpoint {where}: {problem}") from problem
    if int(failed) < control.size:
        raise CheckpointError(
            f"checkpoint {where}: rank {int(failed)} failed, its own error says why; nothing was changed here"
        )
    return done[0]


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _text_checksum(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}.safetensors"


def _own_tensors(handle: Handle) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for unit in handle.runtime.units:
        for number, group in enumerate(unit.groups):
            key = f"{unit.index}.{number}"
            found[f"param.{key}"] = group.whole if group.plan.param.axis is None else group.shard
            if group.master is not None:
                found[f"master.{key}"] = group.master
    for name, buffer in handle.runtime.model.named_buffers():
        found[f"buffer.{name}"] = buffer
    return found


def _tensors(handle: Handle, update: StatefulUpdate | None) -> dict[str, torch.Tensor]:
    optimizer = {} if update is None else update.tensors()
    return {**_own_tensors(handle), **{f"{_OPTIMIZER}{name}": tensor for name, tensor in optimizer.items()}}


def _read_state(folder: Path) -> dict[str, Any]:
    file = folder / STATE
    try:
        state = json.loads(file.read_text())
        if state.pop("checksum") != _text_checksum(state):
            raise CheckpointError(f"{file} is damaged: its content does not match its checksum")
        if state["format"] != FORMAT:
            raise CheckpointError(f"{file} has format {state['format']}; this version of zeroshard reads {FORMAT}")
        return {**state, "plan": Plan.from_json(json.dumps(state["plan"]))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as reader:
            checksums = json.loads((reader.metadata() or {})[_CHECKSUMS])
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from error
    if set(checksums) != set(tensors):
        raise CheckpointError(f"{file} is damaged: it does not hold the tensors that it lists")
    for name, tensor in tensors.items():
        if checksums[name] != _checksum(tensor):
            raise CheckpointError(f"{file} is damaged: tensor {name!r} does not match its checksum")
    return tensors


def _check_plan(plan: Plan, saved: Plan, folder: Path) -> None:
    if plan.dp != saved.dp:
        raise CheckpointError(f"{folder} was saved by {saved.dp} ranks; this format loads at the same number only")
    if plan.units != saved.units:
        raise CheckpointError(f"{folder} is of another model, stage, precision or optimizer than the run")

"""A checkpoint per rank: enough to go on at the same world size and plan.

    DIR/latest                      name of the newest complete checkpoint
    DIR/TAG/rank-0003.safetensors   this rank's shards, master weights and optimizer state, by group
    DIR/TAG/state.json              plan, counters, what the caller adds

A checkpoint is written into a temporary folder and renamed when every rank has finished, so a reader sees a whole one
or none. Only safetensors and JSON: loading runs no code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from zeroshard.engine.handle import Handle
from zeroshard.errors import CheckpointError
from zeroshard.optim.updates import StatefulUpdate
from zeroshard.plan.plan import Plan

LATEST = "latest"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def save(
    handle: Handle, update: StatefulUpdate | None, directory: str | os.PathLike[str], tag: str, extra: Mapping[str, Any]
) -> Path:
    """Write a checkpoint; called by all ranks. `extra` must be JSON-able and is taken from rank 0.

    Raises:
        CheckpointError: the tag is no plain name, or `extra` can't be written as JSON.
    """
    check_tag(tag)
    base = Path(directory)
    final, partial = base / tag, base / f".{tag}.partial"
    try:
        text = json.dumps(
            {
                "format": 1,
                "plan": json.loads(handle.plan.to_json()),
                "counters": {} if update is None else update.counters(),
                "extra": extra,
            }
        )
    except TypeError as error:
        raise CheckpointError(f"checkpoint {final}: client state holds something that JSON can't: {error}") from error
    handle.runtime.drain()
    rank = handle.comm.mesh.rank
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _meet(handle)
    save_file(
        {name: value.contiguous().cpu() for name, value in _tensors(handle, update).items()}, _file(partial, rank)
    )
    if rank == 0:
        (partial / "state.json").write_text(text)
    _meet(handle)
    if rank == 0:
        _publish(base, partial, final)
    _meet(handle)
    return final


def load(
    handle: Handle, update: StatefulUpdate | None, directory: str | os.PathLike[str], tag: str | None
) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint into the running state; called by all ranks. Returns its folder and `extra`.

    Args:
        tag: None for the newest.

    Raises:
        CheckpointError: it is not there, damaged, or of another plan; nothing was changed then.
    """
    folder = find(directory, tag)
    state = _read_state(folder)
    _check_plan(handle.plan, state["plan"], folder)
    saved = _read_tensors(_file(folder, handle.comm.mesh.rank))
    own = _own_tensors(handle)
    for name, tensor in own.items():
        if name not in saved or saved[name].shape != tensor.shape:
            raise CheckpointError(f"{folder}: tensor {name!r} is missing or of another shape")
    handle.runtime.parameters.before_write()
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
    if update is not None:
        update.load_counters(state["counters"])
        update.load_tensors(
            {key.removeprefix("optimizer."): v for key, v in saved.items() if key.startswith("optimizer.")}
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
    folder = base / tag
    if not (folder / "state.json").is_file():
        raise CheckpointError(f"there is no checkpoint {tag!r} in {base}")
    return folder


def check_tag(tag: str) -> None:
    """A tag becomes a folder's name, so it must be a plain one. Raises CheckpointError."""
    if not _TAG.fullmatch(tag):
        raise CheckpointError(f"checkpoint tag {tag!r}: use letters, digits, '.', '_' and '-' only")


def _publish(base: Path, partial: Path, final: Path) -> None:
    if final.exists():
        old = base / f".{final.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(final)
    pointer = base / f".{LATEST}.partial"
    pointer.write_text(final.name)
    pointer.replace(base / LATEST)


def _meet(handle: Handle) -> None:
    """A barrier on the control communicator."""
    control = handle.comm.control
    control.wait(control.all_reduce(torch.zeros(1, device=handle.device), "(checkpoint)"))


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
    return {**_own_tensors(handle), **{f"optimizer.{name}": tensor for name, tensor in optimizer.items()}}


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / "state.json").read_text())
        return {
            "plan": Plan.from_json(json.dumps(state["plan"])),
            "counters": state["counters"],
            "extra": state["extra"],
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'state.json'} is damaged: {error}") from error


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from error


def _check_plan(plan: Plan, saved: Plan, folder: Path) -> None:
    if plan.dp != saved.dp:
        raise CheckpointError(f"{folder} was saved by {saved.dp} ranks; this format loads at the same number only")
    if plan.units != saved.units:
        raise CheckpointError(f"{folder} is of another model, stage or precision than the one that is running")

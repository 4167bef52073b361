"""Save and load a sharded model, its optimizer and all that a run goes on from: `zeroshard.save` and `zeroshard.load`.

    zeroshard.save(model, "checkpoints", "step100", scheduler=scheduler, client_state={"epoch": 3})
    loaded = zeroshard.load(model, "checkpoints", scheduler=scheduler)

What is in a checkpoint has the names and shapes of the model, nothing of the plan: it loads at any number of ranks,
stage, dtype and accumulation. Called by all ranks. The engine's `save_checkpoint` and `load_checkpoint` are these with
its counters added.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint import directory, loading
from zeroshard.checkpoint.generators import generator_states, set_generators
from zeroshard.checkpoint.manifest import MANIFEST, TensorKind
from zeroshard.checkpoint.meeting import LABEL, together
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.saver import Request, Saver
from zeroshard.checkpoint.values import pack, unpack
from zeroshard.engine.gathered import name_of
from zeroshard.engine.handle import Handle, handle_of
from zeroshard.engine.native import find_optimizer, find_stepper
from zeroshard.engine.saved_model import (
    StateLoad,
    buffer_targets,
    parameter_targets,
    persistent_buffers,
    pieces,
)
from zeroshard.engine.step_base import StepperBase
from zeroshard.errors import CheckpointError, UsageError, ZeroShardWarning
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.placement import Residency

_MAX_TAG = 256
_HALF_DONE = "some of the checkpoint was loaded and some not: do not train on with this model; load a whole checkpoint"


@dataclass(frozen=True)
class Loaded:
    """What a load found beside the tensors.

    Attributes:
        folder: of the checkpoint.
        client_state: as it was given to the save.
        counters: those of the engine that saved; empty after a native save.
    """

    folder: Path
    client_state: Any
    counters: Mapping[str, Any]


@dataclass(frozen=True)
class Selection:
    """What of a checkpoint is loaded.

    Attributes:
        optimizer: optimizer state, hyper-parameters and loss scale.
        scheduler: the scheduler's state.
        progress: counters and random number generators.
        strict: names that are missing or too many are errors; else warnings.
    """

    optimizer: bool = True
    scheduler: bool = True
    progress: bool = True
    strict: bool = True


def save(
    model: nn.Module,
    save_dir: str | os.PathLike[str],
    tag: str,
    *,
    scheduler: Any = None,
    client_state: Mapping[str, Any] | None = None,
    background: bool = False,
    latest: bool = True,
    keep: int | None = None,
    frozen: bool = True,
    counters: Mapping[str, Any] | None = None,
) -> Path:
    """Save everything needed to go on; called by all ranks, between steps.

    Args:
        tag: name of the checkpoint; one of the same name is replaced once this one is whole.
        client_state: numbers, text, lists, tuples and dicts, given back by `load`. Rank 0's is saved.
        background: copy the state into host memory and write it in a thread. The next save, load or
            `wait_for_checkpoint` waits for it and raises its error.
        latest: make it the one that a load without a tag finds.
        keep: remove all but so many of the newest checkpoints in the directory afterwards.
        frozen: with parameters that no optimizer trains.
        counters: the engine's.

    Returns:
        The checkpoint's folder, there once the save has ended.

    Raises:
        CheckpointError: it can't be written, on this rank or another; what was there is still there.
    """
    handle, stepper = handle_of(model), find_stepper(model)
    if keep is not None and keep < 1:
        raise UsageError(f"save(keep={keep}): at least the new checkpoint is kept; None keeps all")
    handle.runtime.drain()
    handle.check_members()
    if handle.runtime.gradients.present:
        warnings.warn(
            "saving between backward and step: the gradients since the last step are in no checkpoint; a resumed run "
            "computes them anew",
            ZeroShardWarning,
            stacklevel=2,
        )
    saver = saver_of(handle)
    base = _directory(save_dir)

    def request() -> Request:
        directory.check_tag(tag)
        return Request(
            base=base,
            tag=tag,
            pieces=pieces(handle, None if stepper is None else stepper.update, frozen=frozen),
            aliases=handle.plan.aliases,
            state=_state(handle, model, stepper, scheduler, client_state, counters, frozen),
            own={"generators": generator_states(handle.device)},
            latest=latest,
            keep=keep,
        )

    saver.save(together(saver.meeting(), request, base / str(tag)), background=background)
    return base / tag


def load(
    model: nn.Module,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    scheduler: Any = None,
    selection: Selection = Selection(),
) -> Loaded:
    """Go on from a checkpoint; called by all ranks.

    Args:
        tag: None for the newest.
        scheduler: takes over the saved scheduler's state.

    Raises:
        CheckpointError: it is not there, damaged, or of another model or optimizer, on this rank or another; nothing
            was changed. The message names file and tensor.
    """
    handle, stepper = handle_of(model), find_stepper(model)
    saver = saver_of(handle)
    saver.wait()
    handle.runtime.drain()
    handle.check_members()
    folder = _agreed_folder(handle, _directory(load_dir), tag)

    def prepare() -> _Load:
        reader = CheckpointReader(folder)
        try:
            return _Load(handle, model, stepper, scheduler, reader, selection)
        except CheckpointError:
            reader.close()
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            reader.close()
            what = f"{type(error).__name__} {error}"
            raise CheckpointError(f"{folder / MANIFEST}: its state is not what it must be: {what}") from error

    prepared = together(saver.meeting(), prepare, folder, "; nothing was changed here")
    try:
        prepared.apply()
    finally:
        prepared.reader.close()
    return prepared.loaded


def any_checkpoint(model: nn.Module, load_dir: str | os.PathLike[str]) -> bool:
    """Whether the directory holds a checkpoint, as rank 0 sees it; called by all ranks."""
    handle = handle_of(model)
    saver_of(handle).wait()
    there = torch.tensor([bool(directory.whole(load_dir))], dtype=torch.uint8, device=handle.device)
    handle.comm.control.wait(handle.comm.control.broadcast(there, 0, LABEL))
    return bool(there)


def wait_for_checkpoint(model: nn.Module) -> None:
    """Wait for an asynchronous save. Raises CheckpointError where it failed."""
    saver_of(handle_of(model)).wait()


def saver_of(handle: Handle) -> Saver:
    """The saver of a model, made when it is first needed."""
    if handle.saver is None:
        comm = handle.comm
        handle.saver = Saver(comm.control, comm.mesh.store(), comm.watchdog, handle.device)
    return handle.saver


def _agreed_folder(handle: Handle, base: Path, tag: str | None) -> Path:
    """The checkpoint that rank 0 finds: on a network's disk another rank might not see the newest one yet."""
    meeting, control = saver_of(handle).meeting(), handle.comm.control
    found = together(meeting, lambda: directory.find(base, tag).name if meeting.rank == 0 else "", base)
    name = torch.zeros(_MAX_TAG, dtype=torch.uint8)
    name[: len(found)] = torch.frombuffer(bytearray(found.encode() or b"\0"), dtype=torch.uint8)[: len(found)]
    on_device = name.to(handle.device)
    control.wait(control.broadcast(on_device, 0, LABEL))
    return base / bytes(on_device.tolist()).rstrip(b"\0").decode()


# What is saved beside the tensors.


def _check_counters(counters: Mapping[str, Any]) -> None:
    """Raises ValueError for what no engine has counted. A native save has none."""
    counted = {name: value for name, value in counters.items() if name != "data"}
    places = [value for place in counters.get("data", []) for value in place.values()]
    for name, value in [*counted.items(), *(("data", value) for value in places)]:
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"counters.{name} is {value!r}")


def _directory(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path)
    except TypeError as error:
        raise UsageError(f"a checkpoint's directory is a {type(path).__name__}; give text or a pathlib.Path") from error


def _state(
    handle: Handle,
    model: nn.Module,
    stepper: StepperBase | None,
    scheduler: Any,
    client_state: Mapping[str, Any] | None,
    counters: Mapping[str, Any] | None,
    frozen: bool,
) -> dict[str, Any]:
    optimizer = find_optimizer(model)
    if client_state is not None and not isinstance(client_state, Mapping):
        raise CheckpointError(f"client_state is a {type(client_state).__name__}; give a dict of what is to be kept")
    return {
        "optimizer": _optimizer_state(optimizer, stepper),
        "scaler": None if stepper is None or stepper.scaler is None else dict(stepper.scaler.state_dict()),
        "scheduler": None if scheduler is None else _scheduler_state(scheduler),
        "client_state": pack(dict(client_state or {}), "client_state"),
        "counters": pack(dict(counters or {}), "counters"),
        "frozen": frozen,
        "ranks": handle.comm.mesh.world_size,
    }


def _optimizer_state(optimizer: ShardedOptimizer | None, stepper: StepperBase | None) -> dict[str, Any] | None:
    if optimizer is None or stepper is None:
        return None
    counters = pack(stepper.update.counters(), "optimizer")
    return {"type": optimizer.name, "groups": _groups(optimizer), "counters": counters}


def _scheduler_state(scheduler: Any) -> dict[str, Any]:
    return {"type": type(scheduler).__name__, "state": pack(scheduler.state_dict(), "scheduler")}


def _groups(optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    plain = (bool, int, float, str, list, tuple, type(None))
    return [
        {
            "names": [name_of(parameter) for parameter in group["params"]],
            "options": pack(
                {
                    key: value
                    for key, value in group.items()
                    if key not in ("params", "param_names") and isinstance(value, plain)
                },
                f"optimizer group {number}",
            ),
        }
        for number, group in enumerate(optimizer.param_groups)
    ]


class _Load:
    """A load that has been checked to its end; `apply` only writes.

    Raises:
        CheckpointError: something does not fit or is damaged.
    """

    def __init__(
        self,
        handle: Handle,
        model: nn.Module,
        stepper: StepperBase | None,
        scheduler: Any,
        reader: CheckpointReader,
        selection: Selection,
    ) -> None:
        self.reader = reader
        self._handle, self._stepper = handle, stepper
        self._selection = selection
        self._aliases = handle.plan.aliases
        self._optimizer = find_optimizer(model) if selection.optimizer else None
        self._scheduler = scheduler if selection.scheduler else None
        self._state_load: StateLoad | None = None
        self._problems: list[str] = []
        targets = self._parameters() + buffer_targets(handle, reader)
        if self._optimizer is not None and stepper is not None:
            self._check_optimizer(self._optimizer, stepper)
            self._state_load = StateLoad(handle, stepper.update, reader)
            self._problems += self._state_load.problems
        if self._scheduler is not None:
            self._check_scheduler(self._scheduler)
        self._targets = self._present(targets)
        states = [] if self._state_load is None else self._state_load.targets
        loading.check(reader, [*self._targets, *states], self._problems)
        loading.verify(reader, [*self._targets, *states])
        client_state, counters = unpack(reader.state["client_state"]), unpack(reader.state["counters"])
        _check_counters(counters)
        self.loaded = Loaded(reader.folder, client_state, counters)

    def _parameters(self) -> list[loading.Target]:
        targets = parameter_targets(self._handle)
        own = {self.reader.aliases.get(target.name, target.name) for target in targets}
        own |= set(self._aliases)
        own |= set(persistent_buffers(self._handle.runtime.model))  # an import from DCP can't tell which are buffers
        for name in self.reader.names(TensorKind.PARAMETER):
            if name not in own:
                self._other(f"tensor {name!r} is there, but this model has no such parameter")
        return targets

    def _other(self, problem: str) -> None:
        """A name that is missing or too many."""
        if self._selection.strict:
            self._problems.append(problem)
        else:
            warnings.warn(f"{self.reader.folder}: {problem}", ZeroShardWarning, stacklevel=2)

    def _present(self, targets: list[loading.Target]) -> list[loading.Target]:
        """The targets that the checkpoint has; frozen parameters may have been left out of it on request."""
        frozen = {
            segment.name
            for _, group in self._handle.plan.groups()
            if not group.trainable
            for segment in group.layout.segments
        }
        found: list[loading.Target] = []
        for target in targets:
            if loading.has(self.reader, target.name):
                found.append(target)
            elif self.reader.state.get("frozen") is not False or target.name not in frozen:
                self._other(f"tensor {target.name!r} is missing")
        return found

    def _check_optimizer(self, optimizer: ShardedOptimizer, stepper: StepperBase) -> None:
        saved = self.reader.state.get("optimizer")
        if saved is None:
            self._problems.append(
                "it was saved without an optimizer; load it with load_module_only=True, or selection=Selection("
                "optimizer=False)"
            )
            return
        if saved["type"] not in (None, optimizer.name):  # None: an import that could not tell
            self._problems.append(f"its optimizer is {saved['type']}, this run's {optimizer.name}")
        else:
            same = self.reader.manifest.world_size == self._handle.comm.mesh.world_size
            refusal = stepper.update.refusal(unpack(saved["counters"]), same_ranks=same)
            self._problems += [] if refusal is None else [refusal]
        own = [group["names"] for group in _groups(optimizer)]
        written: list[list[str]] = [group["names"] for group in saved["groups"]]
        theirs = [[self._aliases.get(name, name) for name in names] for names in written]
        if len(own) != len(theirs):
            self._problems.append(f"its optimizer has {len(theirs)} parameter groups, this run's {len(own)}")
        for number, (names, others) in enumerate(zip(own, theirs, strict=False)):
            differing = sorted((set(names) ^ set(others)) - self._without_elements())
            if differing:
                self._problems.append(
                    f"optimizer group {number}: {', '.join(map(repr, differing[:3]))} "
                    f"{'and more ' if len(differing) > 3 else ''}in the checkpoint's or this run's alone"
                )
        if (self.reader.state.get("scaler") is None) != (stepper.scaler is None):
            has = "no loss scale" if stepper.scaler is None else "a loss scale (fp16)"
            warnings.warn(
                f"{self.reader.folder}: this run has {has}, the checkpoint the contrary; that of the run is kept",
                ZeroShardWarning,
                stacklevel=2,
            )

    def _without_elements(self) -> set[str]:
        """Parameters that no optimizer has anything to do with; DeepSpeed's leave them out."""
        segments = (segment for _, group in self._handle.plan.groups() for segment in group.layout.segments)
        return {segment.name for segment in segments if not segment.numel}

    def _check_scheduler(self, scheduler: Any) -> None:
        saved = self.reader.state.get("scheduler")
        own = type(scheduler).__name__
        if saved is None or saved["type"] not in (None, own):
            self._problems.append(
                f"its scheduler is {'none' if saved is None else saved['type']}, this run's {own}; to keep this run's "
                "as it is, load with load_lr_scheduler_states=False"
            )
        else:
            unpack(saved["state"])

    def apply(self) -> None:
        """Take everything over. Raises CheckpointError where a file was lost or damaged in the last moment."""
        parameters = self._handle.runtime.parameters
        parameters.before_write()
        try:
            with torch.no_grad():
                loading.apply(self.reader, self._targets)
                if self._state_load is not None and self._stepper is not None:
                    self._state_load.open()
                    self._stepper.update.load_counters(unpack(self.reader.state["optimizer"]["counters"]))
                    loading.apply(self.reader, self._state_load.targets)
                    self._stepper.update.finish_load()
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_HALF_DONE}") from error
        self._handle.runtime.clear_gradients()
        parameters.written()
        self._refresh_whole()
        self._load_rest()

    def _refresh_whole(self) -> None:
        """Parameters that rest whole but were loaded in shards: bring the shards together."""
        parameters = self._handle.runtime.parameters
        for unit in self._handle.runtime.units:
            if any(g.plan.travels and g.plan.param.residency is Residency.RESIDENT for g in unit.groups):
                parameters.gather(unit.index)
        parameters.settle(resting_only=True)

    def _load_rest(self) -> None:
        state = self.reader.state
        if self._scheduler is not None:
            self._scheduler.load_state_dict(unpack(state["scheduler"]["state"]))
        if self._optimizer is not None:
            for group, saved in zip(self._optimizer.param_groups, state["optimizer"]["groups"], strict=True):
                group.update(unpack(saved["options"]))
            scaler = None if self._stepper is None else self._stepper.scaler
            if scaler is not None and state["scaler"] is not None:
                scaler.load_state_dict(state["scaler"])
        if self._selection.progress and self.reader.manifest.world_size == self._handle.comm.mesh.world_size:
            own = self.reader.manifest.ranks[self._handle.comm.mesh.rank]
            if "generators" in own:  # what is imported has none
                set_generators(own["generators"], self._handle.device)

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint import directory, loading
from zeroshard.checkpoint.audit import Act, check_load, record
from zeroshard.checkpoint.error_barrier import CollectiveBarrier, on_all_ranks
from zeroshard.checkpoint.generators import check_generators, generator_states, set_generators
from zeroshard.checkpoint.keys import KeyService, service_of
from zeroshard.checkpoint.manifest import MANIFEST, TensorKind
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.saver import Request, Saver
from zeroshard.checkpoint.values import pack, unpack
from zeroshard.engine.core.handle import Handle, handle_of
from zeroshard.engine.saving.saved_model import (
    StateLoad,
    buffer_sums,
    buffer_targets,
    differing_buffers,
    parameter_targets,
    persistent_buffers,
    pieces,
)
from zeroshard.engine.saving.saved_options import (
    check_engine_counters,
    counter_problems,
    group_names,
    group_problems,
    restore_groups,
    saved_groups,
)
from zeroshard.engine.step.attached import find_optimizer, find_stepper
from zeroshard.engine.step.schedule import ScheduleLoad, saved_schedule
from zeroshard.engine.step.step_base import StepperBase
from zeroshard.errors import CheckpointError, UsageError, ZeroShardError, ZeroShardWarning
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.placement import Residency

ClientState = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
_HALF_DONE = "some of it was loaded and some not: do not train on with this model; load a whole checkpoint"


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
    client_state: ClientState = None,
    background: bool = False,
    latest: bool = True,
    keep: int | None = None,
    frozen: bool = True,
    counters: Mapping[str, Any] | None = None,
    encryption_key: str | KeyService | None = None,
    audit: bool = False,
) -> Path:
    """Save everything needed to go on; called by all ranks, between steps.

    Args:
        tag: name of the checkpoint; one of the same name is replaced once this one is whole.
        client_state: numbers, text, lists, tuples and dicts, given back by `load`, or a function that gives them. Rank
            0's is saved.
        background: copy the state into host memory and write it in a thread. The next save, load or
            `wait_for_checkpoint` waits for it and raises its error.
        latest: make it the one that a load without a tag finds.
        keep: remove all but so many of the newest checkpoints in the directory afterwards.
        frozen: with parameters that no optimizer trains.
        counters: the engine's.
        encryption_key: encrypts it; `file:PATH`, `env:NAME`, `command:PROGRAM`, or a KeyService of your own.
        audit: log from here on what is done with the checkpoints of the directory.

    Returns:
        The checkpoint's folder, there once the save has ended.

    Raises:
        CheckpointError: it can't be written, on this rank or another; what was there is still there.
    """
    handle, stepper = handle_of(model), find_stepper(model)
    saver = saver_of(handle)
    where = f"{save_dir}/{tag}"

    def prepare() -> tuple[Request, dict[str, int]]:
        base = checked_directory(save_dir)
        base = _from_anywhere(base) if background else base
        directory.check_tag(tag)
        if keep is not None and keep < 1:
            raise UsageError(f"save(keep={keep}): at least the new checkpoint is kept; None keeps all")
        _settle(handle, saver)
        state = _state(handle, model, stepper, scheduler, client_state, counters, frozen)
        rank_state = {"generators": generator_states(handle.device)}
        service = service_of(encryption_key)
        request = Request(base, tag, (), handle.plan.aliases, state, rank_state, latest, keep, service, audit)
        return request, buffer_sums(handle)

    request, sums = on_all_ranks(saver.barrier(), prepare, where)
    _warn_of_gradients(handle)
    differing = differing_buffers(handle, sums)

    def complete() -> Request:
        tensors = pieces(handle, None if stepper is None else stepper.update, differing, frozen=frozen)
        whole = replace(request, pieces=tensors)
        whole.check()
        return whole

    saver.save(on_all_ranks(saver.barrier(), complete, where), background=background)
    return request.final


def load(
    model: nn.Module,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    scheduler: Any = None,
    selection: Selection = Selection(),
    encryption_key: str | KeyService | None = None,
) -> Loaded:
    """Go on from a checkpoint; called by all ranks.

    Args:
        tag: None for the newest.
        scheduler: takes over the saved scheduler's state.
        encryption_key: of an encrypted one, as at the save; by default what ZEROSHARD_CHECKPOINT_KEY names.

    Raises:
        CheckpointError: it is not there, damaged, or of another model or optimizer, on this rank or another; nothing
            was changed. The message names file and tensor.
    """
    handle, stepper = handle_of(model), find_stepper(model)
    saver = saver_of(handle)

    def settle() -> Path:
        _settle(handle, saver)
        return checked_directory(load_dir)

    folder = _agreed_folder(saver.barrier(), on_all_ranks(saver.barrier(), settle, load_dir), tag)

    def prepare() -> _Load:
        if saver.barrier().rank == 0:
            check_load(folder.parent, folder)
        service = service_of(encryption_key)
        reader = CheckpointReader(folder, service)
        _warn_of_plain(reader, service)
        try:
            return _Load(handle, model, stepper, scheduler, reader, selection)
        except (ZeroShardError, Warning) as error:
            reader.close()
            if isinstance(error, CheckpointError) and str(folder) not in str(error):
                raise CheckpointError(f"{folder / MANIFEST}: {error}; nothing was changed") from error
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            reader.close()
            what = f"{type(error).__name__} {error}"
            raise CheckpointError(f"{folder / MANIFEST}: its state is not what it must be: {what}") from error

    prepared = on_all_ranks(saver.barrier(), prepare, folder, "; nothing was changed here")
    try:
        first = saver.barrier().rank == 0
        on_all_ranks(saver.barrier(), lambda: record(folder.parent, Act.LOAD, folder.name) if first else None, folder)
        prepared.apply(saver.barrier())
    finally:
        prepared.reader.close()
    return prepared.loaded


def any_checkpoint(model: nn.Module, load_dir: str | os.PathLike[str]) -> bool:
    """Whether the directory holds a checkpoint, as rank 0 sees it; called by all ranks."""
    barrier = saver_of(handle_of(model)).barrier()

    def look() -> bool:
        saver_of(handle_of(model)).wait()
        base = checked_directory(load_dir)
        return barrier.rank == 0 and bool(directory.whole(base))

    return bool(barrier.broadcast_text("there" if on_all_ranks(barrier, look, load_dir) else "", 0))


def wait_for_checkpoint(model: nn.Module) -> None:
    """Wait for an asynchronous save. Raises CheckpointError where it failed."""
    saver_of(handle_of(model)).wait()


def saver_of(handle: Handle) -> Saver:
    """The saver of a model, made when it is first needed."""
    if handle.saver is None:
        comm = handle.comm
        handle.saver = Saver(comm.control, comm.mesh.store(), comm.watchdog, handle.device)
    return handle.saver


def _settle(handle: Handle, saver: Saver) -> None:
    """Finish everything in flight, a save too. Raises CheckpointError where that failed."""
    saver.wait()
    handle.runtime.drain()
    handle.check_members()


def _warn_of_gradients(handle: Handle) -> None:
    if handle.runtime.gradients.present:
        warnings.warn(
            "saving between backward and step: the gradients since the last step are in no checkpoint; a resumed run "
            "computes them anew",
            ZeroShardWarning,
            stacklevel=3,
        )


def _warn_of_plain(reader: CheckpointReader, service: KeyService | None) -> None:
    if service is not None and reader.manifest.seal is None:
        warnings.warn(
            f"{reader.folder} is not encrypted, though this run has a key for checkpoints: nothing shows that it is "
            "what was saved",
            ZeroShardWarning,
            stacklevel=3,
        )


def _agreed_folder(barrier: CollectiveBarrier, base: Path, tag: str | None) -> Path:
    """The checkpoint that rank 0 finds: on a network's disk another rank might not see the newest one yet."""
    found = on_all_ranks(barrier, lambda: directory.find(base, tag).name if barrier.rank == 0 else "", base)
    return base / barrier.broadcast_text(found, 0)


# What is saved beside the tensors.


def checked_directory(path: str | os.PathLike[str]) -> Path:
    """A directory of checkpoints as it was given. Raises UsageError for empty text and what is no path."""
    if isinstance(path, str) and not path:
        raise UsageError("a checkpoint's directory is empty text; '.' is the current one")
    try:
        return Path(path)
    except TypeError as error:
        raise UsageError(f"a checkpoint's directory is a {type(path).__name__}; give text or a pathlib.Path") from error


def _from_anywhere(directory: Path) -> Path:
    """The directory for a save that comes later: programs change theirs meanwhile, and the text would mean another."""
    try:
        return directory.absolute()
    except OSError:  # there is no working directory any more; the save says so
        return directory


def _state(
    handle: Handle,
    model: nn.Module,
    stepper: StepperBase | None,
    scheduler: Any,
    client_state: ClientState,
    counters: Mapping[str, Any] | None,
    frozen: bool,
) -> dict[str, Any]:
    optimizer = find_optimizer(model)
    if callable(client_state):
        client_state = client_state()
    if client_state is not None and not isinstance(client_state, Mapping):
        raise CheckpointError(f"client_state is a {type(client_state).__name__}; give a dict of what is to be kept")
    return {
        "optimizer": _optimizer_state(optimizer, stepper),
        "scaler": None if stepper is None or stepper.scaler is None else dict(stepper.scaler.state_dict()),
        "scheduler": None if scheduler is None else saved_schedule(scheduler),
        "client_state": pack(dict(client_state or {}), "client_state"),
        "counters": pack(dict(counters or {}), "counters"),
        "frozen": frozen,
        "ranks": handle.comm.mesh.world_size,
    }


def _optimizer_state(optimizer: ShardedOptimizer | None, stepper: StepperBase | None) -> dict[str, Any] | None:
    if optimizer is None or stepper is None:
        return None
    counters = pack(stepper.update.counters(), "optimizer")
    return {"type": optimizer.name, "groups": saved_groups(optimizer), "counters": counters}


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
        self._schedule: ScheduleLoad | None = None
        self._state_load: StateLoad | None = None
        self._problems: list[str] = []
        targets = self._parameters() + buffer_targets(handle, reader)
        if self._optimizer is not None and stepper is not None:
            self._check_optimizer(self._optimizer, stepper)
            self._state_load = StateLoad(handle, stepper.update, reader)
            self._problems += self._state_load.problems
        if scheduler is not None and selection.scheduler:
            self._schedule = ScheduleLoad(scheduler, reader.state.get("scheduler"), find_optimizer(model))
            self._problems += [] if self._schedule.problem is None else [self._schedule.problem]
        self._targets = self._present(targets)
        states = [] if self._state_load is None else self._state_load.targets
        loading.check(reader, [*self._targets, *states], self._problems)
        loading.verify(reader, [*self._targets, *states])
        self._check_generators()
        client_state, counters = unpack(reader.state["client_state"]), unpack(reader.state["counters"])
        check_engine_counters(counters)
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
            counters = unpack(saved["counters"])
            self._problems += counter_problems(counters, stepper.update.counters())
            refusal = None if self._problems else stepper.update.refusal(counters, same_ranks=same)
            self._problems += [] if refusal is None else [refusal]
        own = group_names(optimizer)
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
        self._problems += group_problems(saved["groups"], optimizer)
        if stepper.scaler is not None and self.reader.state.get("scaler") is not None:
            stepper.scaler.check_state(self.reader.state["scaler"])
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

    def _check_generators(self) -> None:
        if (own := self._generators()) is not None:
            check_generators(own)

    def _generators(self) -> Any:
        """This rank's states, where they are gone on from; what is imported has none."""
        manifest, mesh = self.reader.manifest, self._handle.comm.mesh
        if not self._selection.progress or manifest.world_size != mesh.world_size:
            return None
        return manifest.ranks[mesh.rank].get("generators")

    def apply(self, barrier: CollectiveBarrier) -> None:
        """Take everything over, on all ranks. Raises CheckpointError where a file was lost or damaged in the end."""
        try:
            on_all_ranks(barrier, self._write, self.reader.folder)
            if self._state_load is not None and self._stepper is not None:
                with torch.no_grad():
                    self._stepper.update.finish_load()
            self._handle.runtime.clear_gradients()
            self._handle.runtime.gradients.forget_errors()
            self._handle.runtime.parameters.written(stepped=False)
            self._refresh_whole()
            on_all_ranks(barrier, self._load_rest, self.reader.folder)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_HALF_DONE}") from error

    def _write(self) -> None:
        """All tensors, without the other ranks."""
        self._handle.runtime.parameters.before_write()
        with torch.no_grad():
            loading.apply(self.reader, self._targets)
            if self._state_load is not None and self._stepper is not None:
                self._state_load.open()
                self._stepper.update.load_counters(unpack(self.reader.state["optimizer"]["counters"]))
                loading.apply(self.reader, self._state_load.targets)

    def _refresh_whole(self) -> None:
        """Parameters that rest whole but were loaded in shards: bring the shards together."""
        parameters = self._handle.runtime.parameters
        for unit in self._handle.runtime.units:
            if any(g.plan.travels and g.plan.param.residency is Residency.RESIDENT for g in unit.groups):
                parameters.gather(unit.index)
        parameters.meet_peers()
        parameters.settle(resting_only=True)

    def _load_rest(self) -> None:
        state = self.reader.state
        if self._schedule is not None:
            self._schedule.apply()
        if self._optimizer is not None:
            restore_groups(state["optimizer"]["groups"], self._optimizer)
            scaler = None if self._stepper is None else self._stepper.scaler
            if scaler is not None and state["scaler"] is not None:
                scaler.load_state_dict(state["scaler"])
        if (own := self._generators()) is not None:
            set_generators(own, self._handle.device)

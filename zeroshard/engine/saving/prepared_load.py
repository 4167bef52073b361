"""A checkpoint load in two phases: everything is checked first, and only then the model is changed.

    made       check table, names, shapes, optimizer, scheduler, and all checksums of this rank's tensors
    apply      write tensors, then what depends on them, on all ranks

Rejected: checking each tensor just before it is written, which leaves half a model if the last one is damaged.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint import loading
from zeroshard.checkpoint.error_barrier import CollectiveBarrier, on_all_ranks
from zeroshard.checkpoint.generators import check_generators, set_generators
from zeroshard.checkpoint.manifest import TensorKind
from zeroshard.checkpoint.reader import StateReader
from zeroshard.checkpoint.values import unpack
from zeroshard.engine.core.handle import Handle
from zeroshard.engine.saving.all_stages import WholeModel
from zeroshard.engine.saving.saved_model import (
    StateLoad,
    buffer_targets,
    parameter_targets,
)
from zeroshard.engine.saving.saved_options import (
    check_engine_counters,
    counter_problems,
    group_problems,
    restore_groups,
)
from zeroshard.engine.step.attached import find_optimizer
from zeroshard.engine.step.schedule import ScheduleLoad
from zeroshard.engine.step.step_base import StepperBase
from zeroshard.errors import CheckpointError, ZeroShardWarning
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.placement import Residency

_HALF_DONE = "only a part of it was loaded: do not continue with this model; load an undamaged checkpoint"


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
    """The parts of a checkpoint that are loaded.

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

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parts that are not loaded, by name."""
        asked = {"optimizer": self.optimizer, "scheduler": self.scheduler, "progress": self.progress}
        return tuple(name for name, loads in asked.items() if not loads)


EVERYTHING = Selection()


class PreparedLoad:
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
        reader: StateReader,
        selection: Selection,
        names: WholeModel,
    ) -> None:
        self.reader, self._names = reader, names
        self._handle, self._stepper = handle, stepper
        self._selection = selection
        self._aliases = names.aliases
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
        own |= set(self._names.aliases)
        own |= self._names.names  # buffers too: an import from DCP can't tell which are
        own |= {self.reader.aliases.get(name, name) for name in self._names.names}
        for name in self.reader.names(TensorKind.PARAMETER):
            if name not in own:
                self._name_problem(f"tensor {name!r} is there, but this model has no such parameter")
        return targets

    def _name_problem(self, problem: str) -> None:
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
                self._name_problem(f"tensor {target.name!r} is missing")
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
            same = self.reader.manifest.world_size == self._handle.comm.ranks
            counters = unpack(saved["counters"])
            self._problems += counter_problems(counters, stepper.update.counters())
            refusal = None if self._problems else stepper.update.refusal(counters, same_ranks=same)
            self._problems += [] if refusal is None else [refusal]
        own = self._names.groups or []
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
        """Parameters without elements; DeepSpeed's optimizers leave them out."""
        segments = (segment for _, group in self._handle.plan.groups() for segment in group.layout.segments)
        return {segment.name for segment in segments if not segment.numel}

    def _check_generators(self) -> None:
        if (own := self._generators()) is not None:
            check_generators(own)

    def _generators(self) -> Any:
        """This rank's saved states of random generators, if they apply; imported checkpoints have none."""
        manifest, comm = self.reader.manifest, self._handle.comm
        if not self._selection.progress or manifest.world_size != comm.ranks:
            return None
        return manifest.ranks[comm.rank].get("generators")

    def apply(self, barrier: CollectiveBarrier) -> None:
        """Write all state, on all ranks. Raises CheckpointError if a file was lost or damaged after the checks."""
        try:
            on_all_ranks(barrier, self._write, self.reader.folder)
            if self._state_load is not None and self._stepper is not None:
                with torch.no_grad():
                    self._stepper.update.finish_load()
            self._handle.runtime.clear_gradients()
            self._handle.runtime.gradients.forget_errors()
            self._handle.runtime.parameters.mark_written(stepped=False)
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
            if any(g.plan.is_gathered and g.plan.param.residency is Residency.RESIDENT for g in unit.groups):
                parameters.gather(unit.index)
        parameters.issue_peer_barrier()
        parameters.wait_for_gathers(resting_only=True)

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

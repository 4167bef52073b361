"""The base of all steppers: the report of a step, the scaling factors, non-finite gradients, and the order of units.

    coefficient = 1/ranks (mean) * predivide / loss scale * min(1, clip_norm / norm)

The update itself applies the coefficient, so that gradients are read once. A step with inf or NaN in its gradients is
not applied unless the plan says so; then it is not clipped.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.core.runtime import Runtime
from zeroshard.engine.step.group_table import GroupTable
from zeroshard.errors import NonFiniteError, UsageError
from zeroshard.mesh import TENSOR
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.updates import StatefulUpdate
from zeroshard.plan.policy import OnNonFinite

_LOGGER = logging.getLogger("zeroshard")
SKIPS_BEFORE_A_WARNING = 20
"""Skipped steps in a row after which the log says that nothing is being learned."""


@dataclass(frozen=True)
class StepReport:
    """What the last step did.

    Attributes:
        applied: whether the parameters were updated.
        norm: global norm of the averaged, unscaled gradients, before clipping; None when there were none.
        nonfinite: name of the first parameter with a non-finite gradient, None when all were finite.
    """

    applied: bool
    norm: float | None = None
    nonfinite: str | None = None


def regions_of_units(runtime: Runtime) -> dict[int, range]:
    """Numbers of each unit's regions: those of all trainable groups in plan order."""
    found: dict[int, range] = {}
    first = 0
    for unit in runtime.units:
        found[unit.index] = range(first, first + len(unit.trainable))
        first += len(unit.trainable)
    return found


class StepperBase(ABC):
    """Runs the steps of one model and optimizer.

    Args:
        update: the optimizer's state, for checkpoints.
        scaler: loss scale for fp16, None otherwise.

    Attributes:
        groups: the optimizer's live groups.
        unapplied: steps that updated nothing, of those whose outcome is known.
    """

    def __init__(self, handle: Handle, update: StatefulUpdate, scaler: LossScaler | None) -> None:
        self.handle = handle
        self.update = update
        self.scaler = scaler
        self.unapplied = 0
        self._report = StepReport(applied=False)
        self._skipped_in_a_row = 0
        self._clip_once: tuple[float, int] | None = None  # the norm, and which gradients it is for
        self._table = GroupTable(handle)
        self._missing_counts = [0] * len(handle.runtime.units)
        # A tied parameter that was replaced under one name still gets gradients under the other. Each step checks two.
        tied = handle.tied()
        self._tied = itertools.cycle(tied) if tied else None
        self.groups: Sequence[Mapping[str, Any]] = ()

    def check_open(self) -> None:
        """Raises UsageError when the model was closed, or where parameters of it were replaced since it was sharded."""
        self.handle.check_open()
        silent = self.handle.runtime.gradients.missing_counts()
        if (
            silent != self._missing_counts
        ):  # a replaced parameter gets no gradient any more; checking all in every step would be slow
            self._missing_counts = silent
            self.handle.check_members()
        elif self._tied is not None:
            for name, member in itertools.islice(self._tied, 2):
                self.handle.check_member(name, member)

    @property
    def state_buffers(self) -> Sequence[torch.Tensor]:
        """Device buffers for state that is streamed from host memory."""
        return ()

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return False

    def refuse_capture(self, call: str) -> None:
        """Raises UsageError while a step is captured, since `call` counts on the host, which a replay does not do."""
        if self.capturing:
            raise UsageError(
                f"{call} in a GraphedStep: what it counts and decides would stay what it was at the capture. Make the "
                "step with zeroshard.GraphedStep(engine, ...), and call only forward, backward and step in it"
            )

    @property
    def report(self) -> StepReport:
        """The report of the last step; waits for the device if the step is still running."""
        self.read_outcomes()
        return self._report

    @abstractmethod
    def step(self, optimizer: ShardedOptimizer) -> None:
        """One optimizer step.

        Raises:
            NonFiniteError: gradients hold inf or NaN and the plan says so; nothing was updated.
            DivergenceError: ranks issued different collectives since the last step; nothing was updated.
        """

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients of backwards since the last step."""
        return self.handle.runtime.gradients.present

    @property
    def leaves_out(self) -> bool:
        """Whether trained parameters got no gradient since the last step: some on this rank, or all of them."""
        gradients = self.handle.runtime.gradients
        return not gradients.present or any(gradients.missing_counts())

    @property
    def kept_consumed(self) -> bool:
        """Whether the script has kept, as far as it knows, the gradients that the last step consumed."""
        return self.handle.runtime.gradients.kept_consumed

    def leave_consumed(self) -> None:
        """After a step with gradients: let `kept_consumed` show whether the script drops them."""
        self.handle.runtime.gradients.leave_consumed()

    def updates_of(self, parameter: torch.Tensor) -> float | None:
        """How often a parameter was updated; None if it is not this model's, or if its updates are not counted."""
        first = 0
        for unit in self.handle.runtime.units:
            for number, group in enumerate(unit.trainable):
                index = next((index for index, one in enumerate(group.parameters) if one is parameter), None)
                if index is not None:
                    self.read_outcomes()
                    return self.update.updates_of(first + number, index)
            first += len(unit.trainable)
        return None

    @abstractmethod
    def norm(self) -> float:
        """Norm of the averaged, unscaled gradients of the backwards since the last step."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the gradients of the backwards since the last step."""

    @abstractmethod
    def gradients_changed(self) -> None:
        """The gradients, or their memory, were changed, so their measured norm is out of date."""

    def start_accumulating(self, dtype: str | None = None) -> None:
        """From the next step on several micro-batches may make one update; called by all ranks, between steps.

        Args:
            dtype: of the accumulators; None means float32.

        Raises:
            UsageError: there are gradients of a step that has not been made.
        """
        runtime = self.handle.runtime
        if runtime.gradients.present:
            raise UsageError("the accumulation can't change between a backward and its step; change it after the step")
        runtime.start_accumulating(dtype)
        self.gradients_changed()

    def unscale(self) -> float:
        """The factor from the ranks' sum of scaled gradients to their unscaled mean. Waits for the device with fp16."""
        return self._mean_factor() / (1.0 if self.scaler is None else float(self.scaler.scale))

    @property
    def applies_nonfinite(self) -> bool:
        """Whether inf and NaN in the gradients are applied like any other value."""
        return self.handle.plan.policy.on_nonfinite is OnNonFinite.APPLY

    @property
    def overflowed(self) -> bool:
        """Whether the last step was skipped for a loss scale that was too high. Waits for the device with fp16."""
        return self.scaler is not None and not self.report.applied

    @property
    @abstractmethod
    def outcome_known(self) -> bool:
        """Whether the outcome of the last step is known without waiting."""

    @abstractmethod
    def read_outcomes(self) -> None:
        """Wait for the outcome of the last step and act on it."""

    def _record_groups(self) -> None:
        """Add the hyper-parameters of the coming step to the log whose digest the ranks compare."""
        if self.handle.comm.control.size > 1:
            self.handle.comm.log.record_step(self.group_table())

    def _compare_copies(self) -> None:
        """In the first steps: raises UsageError where ranks of `tp` have other gradients of what all of them have."""
        runtime, comm = self.handle.runtime, self.handle.comm
        if runtime.gradients.copies is not None:
            axis = comm.gathers[(TENSOR,)]
            runtime.gradients.copies.compare(runtime.units, axis, comm.control, capturing=self.capturing)

    def group_table(self) -> str:
        """The hyper-parameters of the coming step as they stand in the log."""
        return self._table.text(self.groups)

    def clip_next(self, max_norm: float) -> None:
        """Clip the present gradients to `max_norm` in their step, instead of the plan's clip_norm."""
        self._clip_once = max_norm, self.handle.runtime.gradients.cleared

    def _limit(self) -> float:
        """The norm above which the coming step is clipped; 0 means none."""
        if self._clip_once is not None and self._clip_once[1] == self.handle.runtime.gradients.cleared:
            return self._clip_once[0]
        return self.handle.plan.policy.clip_norm

    def _mean_factor(self) -> float:
        """The factor from the ranks' sum of (predivided) gradients to their mean."""
        policy = self.handle.plan.policy
        return policy.predivide / (self.handle.plan.summed_ranks if policy.mean else 1)

    def _report_applied(self, norm: float) -> None:
        """The last step updated the parameters."""
        self._skipped_in_a_row = 0
        self._report = StepReport(applied=True, norm=norm)

    def _report_nothing(self) -> None:
        """There were no gradients."""
        self._clip_once = None
        self.unapplied += 1
        self._report = StepReport(applied=False)

    def _report_skipped(self, norm: float, name: str, scales: tuple[float, float] | None) -> None:
        """The gradients were not finite and nothing was updated: raise or log, as the plan says."""
        self.unapplied += 1
        self._report = StepReport(applied=False, norm=norm, nonfinite=name)
        self._skipped_in_a_row += 1
        where = f"first in {name}"
        if self.handle.plan.policy.on_nonfinite is OnNonFinite.RAISE:
            raise NonFiniteError(
                f"the gradients are not finite, {where}; the step was not applied and the parameters are unchanged. "
                "Look for a loss that is inf or NaN, a too large learning rate, or bad input"
            )
        scale = "" if scales is None else f"; loss scale {scales[0]:g} -> {scales[1]:g}"
        _LOGGER.warning("step skipped: gradients not finite, %s%s", where, scale)
        if self._skipped_in_a_row % SKIPS_BEFORE_A_WARNING == 0:
            _LOGGER.error(
                "%d steps in a row were skipped, %s: nothing is being learned. "
                "A NaN does not come from the loss scale; look at the loss and the input",
                self._skipped_in_a_row,
                where,
            )

    def _adopt_seen_order(self) -> None:
        """After the first forward: run the lists in the order in which it used the units, if all ranks saw the same."""
        runtime, control = self.handle.runtime, self.handle.comm.control
        seen = runtime.seen_order
        runtime.adopt_outside_reads()
        if seen is None:
            return
        units = len(runtime.units)
        digest = 0
        for unit in seen:
            digest = (digest * (units + 1) + unit + 1) % (1 << 61)
        mine = torch.tensor([digest, -digest], dtype=torch.int64, device=self.handle.device)
        control.wait(control.all_reduce(mine, "(order)", op=torch.distributed.ReduceOp.MAX))
        agreed = int(mine[0]) == -int(mine[1])
        runtime.adopt_order(seen if agreed and seen else None)

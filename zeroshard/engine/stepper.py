"""The step: finish the gradients, agree on norm and health, update the sharded state, gather for the next forward.

    coefficient = 1/ranks (mean) * predivide / loss scale * min(1, clip_norm / norm)

is applied by the update itself, so gradients are read once. An update from gradients with inf or NaN is never applied.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.engine.handle import Handle
from zeroshard.engine.statistics import Statistics, exchange, first_nonfinite
from zeroshard.errors import NonFiniteError
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.updates import UpdateMethod
from zeroshard.plan.plan import OnNonFinite

_LOGGER = logging.getLogger("zeroshard")
LOUD_SKIPS = 20
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


class Stepper:
    """Runs the steps of one model and optimizer.

    Args:
        scaler: loss scale for fp16, None otherwise.
    """

    def __init__(self, handle: Handle, update: UpdateMethod, scaler: LossScaler | None) -> None:
        self.handle = handle
        self.update = update
        self.scaler = scaler
        self.report = StepReport(applied=False)
        self._skipped_in_a_row = 0
        self._clip_next: float | None = None

    def clip_next(self, max_norm: float) -> None:
        """Clip the coming step to `max_norm` instead of the plan's clip_norm."""
        self._clip_next = max_norm

    def step(self, optimizer: ShardedOptimizer) -> None:
        """One optimizer step; see the module's formula.

        Raises:
            NonFiniteError: gradients hold inf or NaN and the plan says so; nothing was updated.
            DivergenceError: ranks issued different collectives since the last step; nothing was updated.
        """
        runtime = self.handle.runtime
        runtime.gradients.notice_dropped()
        if not runtime.gradients.present:
            self.handle.last = None
            self.report = StepReport(applied=False)
            return
        statistics = self.measure()
        norm = math.sqrt(statistics.squared_norm) * self._unscale() if statistics.squared_norm >= 0 else math.nan
        if not math.isfinite(norm):
            self._refuse(norm)
            return
        coefficient = self._unscale() * self._clip(norm)
        self._skipped_in_a_row, self._clip_next = 0, None
        self.report = StepReport(applied=True, norm=norm)
        self._update_scale(overflow=False)
        self._apply(statistics.active, coefficient, optimizer.param_groups)
        self._learn_order()
        runtime.after_step(changed=True)

    def measure(self) -> Statistics:
        """Finish the gradients and exchange their statistics; once per step."""
        handle, comm = self.handle, self.handle.comm
        if handle.last is None:
            handle.runtime.finish_gradients()
            first_replica = comm.mesh.axis("replicate").rank == 0
            handle.last = exchange(handle.runtime, comm.control, digest=comm.log.digest(), first_replica=first_replica)
            if not handle.last.agree:
                comm.watchdog.explain_mismatch()
        return handle.last

    def norm(self) -> float:
        """Norm of the averaged, unscaled gradients of the backwards since the last step."""
        return math.sqrt(self.measure().squared_norm) * self._unscale()

    def zero_grad(self) -> None:
        """Forget the gradients of the backwards since the last step."""
        self.handle.last = None
        self.handle.runtime.clear_gradients()

    def _unscale(self) -> float:
        policy = self.handle.plan.policy
        mean = self.handle.plan.dp if policy.mean else 1
        scale = 1.0 if self.scaler is None else float(self.scaler.scale)
        return policy.predivide / mean / scale

    def _clip(self, norm: float) -> float:
        limit = self.handle.plan.policy.clip_norm if self._clip_next is None else self._clip_next
        return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0

    def _apply(self, active: Sequence[bool], coefficient: float, groups: Sequence[Mapping[str, Any]]) -> None:
        self.handle.runtime.parameters.before_write()
        with torch.no_grad():
            self.update.apply(coefficient, active, groups)
        self.handle.last = None

    def _refuse(self, norm: float) -> None:
        """The gradients are not finite: nothing is updated; skip or raise as the plan says."""
        runtime, policy = self.handle.runtime, self.handle.plan.policy
        name = first_nonfinite(runtime, self.handle.comm.control)
        self.report = StepReport(applied=False, norm=norm, nonfinite=name)
        scale = None if self.scaler is None else float(self.scaler.scale)
        self._update_scale(overflow=True)
        self._skipped_in_a_row += 1
        self.handle.last = None
        self._clip_next = None
        runtime.after_step(changed=False)
        where = f"first in {name}"
        if policy.on_nonfinite is OnNonFinite.RAISE:
            raise NonFiniteError(
                f"the gradients are not finite, {where}; the step was not applied and the parameters are unchanged. "
                "Look for a loss that is inf or NaN, a too large learning rate, or bad input"
            )
        if scale is not None and self.scaler is not None:
            _LOGGER.warning(
                "step skipped: gradients not finite, %s; loss scale %g -> %g", where, scale, float(self.scaler.scale)
            )
        else:
            _LOGGER.warning("step skipped: gradients not finite, %s", where)
        if self._skipped_in_a_row % LOUD_SKIPS == 0:
            _LOGGER.error(
                "%d steps in a row were skipped, %s: nothing is being learned. "
                "A NaN does not come from the loss scale; look at the loss and the input",
                self._skipped_in_a_row,
                where,
            )

    def _update_scale(self, *, overflow: bool) -> None:
        if self.scaler is not None:
            self.scaler.update(torch.tensor(float(overflow), device=self.handle.device))

    def _learn_order(self) -> None:
        """After the first forward: run the lists in the order in which it used the units, if all ranks saw the same."""
        runtime, control = self.handle.runtime, self.handle.comm.control
        seen = runtime.seen_order
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

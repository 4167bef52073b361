"""A step in which the host decides, after reading the norm: for CPUs, and for optimizers without a device kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.core.statistics import Norms, Statistics, exchange, first_nonfinite
from zeroshard.engine.step.step_base import StepperBase
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.updates import UpdateMethod


class HostStepper(StepperBase):
    """Reads the statistics on the host, then updates or refuses."""

    def __init__(self, handle: Handle, update: UpdateMethod, scaler: LossScaler | None) -> None:
        super().__init__(handle, update, scaler)
        self._update_method = update
        self._measured = 0
        self._norms: Norms = {}

    @property
    def outcome_known(self) -> bool:
        return True

    def read_outcomes(self) -> None:
        """The outcome of a step is known when it returns."""

    def step(self, optimizer: ShardedOptimizer) -> None:
        """See StepperBase."""
        runtime, self.groups = self.handle.runtime, optimizer.param_groups
        runtime.inspect()
        if not runtime.gradients.present:
            self.handle.last = None
            self._report_nothing()
            return
        statistics = self.measure()
        norm = math.sqrt(statistics.squared_norm) * self.unscale() if statistics.squared_norm >= 0 else math.nan
        limit = self._limit()
        finite = math.isfinite(norm)
        if not finite and not self.applies_nonfinite:
            self._refuse(norm)
            return
        coefficient = self.unscale() * (min(1.0, limit / (norm + 1e-6)) if limit > 0 and finite else 1.0)
        self._apply(statistics.active, coefficient, optimizer.param_groups)
        self._report_applied(norm)
        self._update_scale(overflow=False)
        self._adopt_seen_order()
        runtime.after_step(changed=True)

    def measure(self) -> Statistics:
        """Finish the gradients and exchange their statistics, unless that was done for these gradients."""
        handle, comm = self.handle, self.handle.comm
        collected = handle.runtime.gradients.collected
        if handle.last is None or self._measured != collected:
            self._measured = collected
            handle.runtime.finish_gradients()
            self._compare_copies()
            self._record_groups()
            handle.last = exchange(
                handle.runtime,
                comm.control,
                self._norms,
                digest=comm.log.digest(),
                whole=handle.runtime.reduce_policy.keeps_local,
                stages=comm.stages,
            )
            if not handle.last.agree:
                comm.explain_mismatch()
        return handle.last

    def norm(self) -> float:
        """See StepperBase."""
        return math.sqrt(self.measure().squared_norm) * self.unscale()

    def zero_grad(self) -> None:
        """See StepperBase."""
        self.handle.last = None
        self.handle.runtime.clear_gradients()

    def gradients_changed(self) -> None:
        """See StepperBase."""
        self.handle.last = None

    def _apply(self, active: Sequence[bool], coefficient: float, groups: Sequence[Mapping[str, Any]]) -> None:
        self.handle.runtime.parameters.before_write()
        with torch.no_grad():
            self._update_method.apply(coefficient, active, groups)
        self.handle.last = None

    def _refuse(self, norm: float) -> None:
        """The gradients are not finite: nothing is updated."""
        runtime = self.handle.runtime
        comm, whole = self.handle.comm, runtime.reduce_policy.keeps_local
        name = first_nonfinite(runtime, comm.control, whole=whole, stages=comm.stages)
        before = None if self.scaler is None else float(self.scaler.scale)
        self._update_scale(overflow=True)
        scales = None if self.scaler is None or before is None else (before, float(self.scaler.scale))
        self.handle.last = None
        self.handle.runtime.after_step(changed=False)
        self._report_skipped(norm, name, scales)

    def _update_scale(self, *, overflow: bool) -> None:
        if self.scaler is not None:
            self.scaler.update(torch.tensor(float(overflow), device=self.handle.device))

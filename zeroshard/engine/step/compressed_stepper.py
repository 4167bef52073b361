"""The step of 1-bit optimizers: after a warm-up they average compressed momentum instead of gradients.

    warm-up     the backward reduces gradients as usual; the update does not communicate
    afterwards  the backward keeps whole local gradients; the update sends one bit per parameter in both directions

A step makes the switch, so it is the same on all ranks. Overflow is still detected by all ranks together. The norm of
the averaged gradients is unknown, so gradients are not clipped by it and `get_global_grad_norm` returns None.
"""

from __future__ import annotations

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.step.step_base import StepReport
from zeroshard.engine.step.stepper import HostStepper
from zeroshard.errors import PlanError, UsageError
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.updates import CompressedUpdate


class CompressedStepper(HostStepper):
    """Runs steps of a 1-bit optimizer."""

    def __init__(self, handle: Handle, update: CompressedUpdate, scaler: LossScaler | None) -> None:
        super().__init__(handle, update, scaler)
        if handle.plan.policy.clip_norm:
            raise PlanError(
                "the plan clips by the gradients' norm, which a 1-bit optimizer never knows: set clip_norm 0"
            )
        handle.runtime.reduce_policy.keep_local_while(lambda: update.compressing)

    def step(self, optimizer: ShardedOptimizer) -> None:
        """See StepperBase."""
        local = self.handle.runtime.reduce_policy.keeps_local
        super().step(optimizer)
        if local and self._report.applied:
            self._report = StepReport(applied=True)

    def norm(self) -> float:
        """See StepperBase. Raises UsageError once gradients are not averaged any more."""
        if self.handle.runtime.reduce_policy.keeps_local:
            raise UsageError(
                "the norm of the averaged gradients is not known: after the optimizer's warm-up they are never averaged"
            )
        return super().norm()

    def _mean_factor(self) -> float:
        if not self.handle.runtime.reduce_policy.keeps_local:
            return super()._mean_factor()
        # The update takes the mean over ranks itself, and nothing was divided before a reduce.
        return 1.0 if self.handle.plan.policy.mean else float(self.handle.plan.dp)

"""What scripts ask DeepSpeed's optimizer wrappers for: the loss scale, and the optimizer inside.

It is put on the optimizer that `initialize` returns. A subclass was rejected: the optimizer is made by the engine, and
these are plain facts about it.
"""

from __future__ import annotations

from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer


class LossScale:
    """The loss scale as it is now. Reading it waits for the device.

    Attributes:
        dynamic: whether it moves.
    """

    def __init__(self, scaler: LossScaler | None) -> None:
        self._scaler = scaler
        self.dynamic = scaler is not None and scaler.dynamic

    @property
    def loss_scale(self) -> float:
        """1.0 where the loss is not scaled."""
        return 1.0 if self._scaler is None else float(self._scaler.scale)

    @property
    def cur_scale(self) -> float:
        """The same."""
        return self.loss_scale


def describe_optimizer(optimizer: ShardedOptimizer, scaler: LossScaler | None) -> None:
    """Put `loss_scaler`, `dynamic_loss_scale` and `optimizer` on it."""
    scale = LossScale(scaler)
    inner = optimizer if optimizer.client is None else optimizer.client
    vars(optimizer).update(loss_scaler=scale, dynamic_loss_scale=scale.dynamic, optimizer=inner)

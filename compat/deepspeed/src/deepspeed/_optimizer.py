"""What scripts ask DeepSpeed's optimizer wrappers for: the loss scale, and the optimizer inside.

It is put on the optimizer that `initialize` returns, which is made by the engine. Where DeepSpeed returns the very
optimizer that it was given (stage 0 in fp32), ours becomes one of that class too, for scripts that ask with isinstance:
its methods come first, those of the class after.
"""

from __future__ import annotations

import torch

from deepspeed.ops.adam import FusedAdam
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


class _StandsForClient(ShardedOptimizer):
    """Compares equal to the optimizer in whose place it is."""

    def __eq__(self, other: object) -> bool:
        return self is other or (other is not None and other is self.client)

    __hash__ = object.__hash__


def stand_for_client(optimizer: ShardedOptimizer, *, torch_adam: bool) -> None:
    """Make it an instance of the class that DeepSpeed's `initialize` returns at stage 0 in fp32, too.

    Args:
        torch_adam: the config asks for torch's Adam, not for the fused one.
    """
    if optimizer.client is not None:
        kind = type(optimizer.client)
    elif optimizer.name in ("Adam", "AdamW") and not torch_adam:
        kind = FusedAdam
    else:
        found = getattr(torch.optim, optimizer.name, None)
        if not isinstance(found, type):
            return
        kind = found
    optimizer.__class__ = type(f"Sharded{kind.__name__}", (_StandsForClient, kind), {})

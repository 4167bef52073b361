"""Divides and scales the loss of every backward of an engine's model, whether the engine or user code starts it.

    engine.backward(loss)            loss / accumulation steps * loss scale, before the graph runs
    engine.scale(loss).backward()    the same, divided by a hook on the scaled loss
    loss.backward()                  gradients / accumulation steps, as they are collected; refused under a loss scale

The loss of a direct backward may be computed outside of the engine, from several outputs or from outputs of several
engines. Then no single tensor has a gradient to divide, and hooks on all outputs would divide twice if one output is
computed from another. So each engine divides its gradients once, when they are collected, by its accumulation steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroshard.engine.batching import Batching
from zeroshard.engine.core.autograd import graph_task
from zeroshard.engine.core.runtime import Runtime
from zeroshard.errors import UnscaledLossError, UsageError
from zeroshard.optim.loss_scale import LossScaler

_DIVIDED: weakref.WeakKeyDictionary[Backwards, int] = weakref.WeakKeyDictionary()
"""The last graph whose loss each engine divided. A loss may be computed from outputs of several engines; the other
engines see only the running graph, and must not divide again what one of them has divided."""


class Backwards:
    """Divides and scales the losses of one engine.

    Attributes:
        divides: whether the engine divides by the accumulation steps by default.
        since_step: backwards that collected gradients since `count_from_here`.
        per_step: how many backwards a pipeline schedule makes per step; None if the batching finds the last one.
    """

    def __init__(self, runtime: Runtime, scaler: LossScaler | None, batching: Batching) -> None:
        self.divides = True
        self.since_step = 0
        self.per_step: int | None = None
        self._scaler = scaler
        self._batching = batching
        self._runtime = runtime
        self._started_by_engine = False
        runtime.reduce_policy.before_each_backward(self._on_begin)

    def _on_begin(self) -> float:
        """The factor for the gradients of the backward that begins. Raises UnscaledLossError."""
        divided_by = next((engine for engine, task in _DIVIDED.items() if task == graph_task()), None)
        if self._scaler is not None and not self._started_by_engine and divided_by is not self:
            raise UnscaledLossError(
                "loss.backward() under a loss scale: gradients in float16 would vanish, and the step would divide them "
                "by the scale once more. Call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self.since_step += 1
        last = self._batching.at_boundary if self.per_step is None else self.since_step == self.per_step
        self._runtime.reduce_policy.set_boundary(last)
        return 1.0 if self._started_by_engine or divided_by is not None or not self.divides else 1.0 / self._steps

    @property
    def _steps(self) -> int:
        return self._batching.sizes.accumulation

    @contextmanager
    def started_by_engine(self) -> Iterator[None]:
        """A context for backwards that the engine starts: their loss is divided and scaled already."""
        self._started_by_engine = True
        try:
            yield
        finally:
            self._started_by_engine = False

    def divide_and_scale(self, loss: torch.Tensor, *, divide: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The divided loss, and the divided and scaled loss, for a backward inside `started_by_engine`."""
        check_scalar("backward", loss)
        if divide and self._steps > 1:
            loss = loss / self._steps
            loss.register_hook(self._mark)
        return loss, loss if self._scaler is None else loss.float() * self._scaler.scale

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale. Its backward divides by the accumulation steps."""
        check_scalar("scale", loss)
        if not loss.requires_grad:
            raise UsageError("scale needs a loss that was made with gradients; it is for the backward alone")
        scaled = loss.view_as(loss) if self._scaler is None else loss.float() * self._scaler.scale
        scaled.register_hook(self._divide)
        return scaled

    def _mark(self, _: torch.Tensor) -> None:
        _DIVIDED[self] = graph_task()

    def _divide(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._started_by_engine:
            raise UsageError("engine.backward(engine.scale(loss)) would scale twice: call engine.backward(loss)")
        _DIVIDED[self] = graph_task()
        return gradient / self._steps if self.divides and self._steps > 1 else gradient

    def count_from_here(self) -> int:
        """The backwards since the last call."""
        count, self.since_step = self.since_step, 0
        return count


def check_scalar(call: str, loss: object) -> None:
    """Raises UsageError if `loss` is not a scalar tensor."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(f"{call} needs a scalar loss, got {what}; reduce it first, e.g. loss.mean()")

"""Backwards that an exception ended, and derivatives that no backward of a pass is: what is refused, and the words.

Autograd calls back at the end of a graph that ran through, and says nothing of one that failed. But what it was to
call lives as long as the graph runs, so a weak reference to it tells a failed backward from one that is running.
Rejected: catching exceptions in the engine's `backward`, which does not see `loss.backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

import torch

from zeroshard.engine.core.autograd import transforming
from zeroshard.engine.memory.unit import Unit
from zeroshard.errors import UsageError


class EndOfBackward:
    """What autograd calls at the end of a graph. It lives as long as the graph runs, however that ends."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end()


def refuse_half_done(what: str) -> NoReturn:
    """Raises UsageError for what comes after a backward that failed."""
    raise UsageError(
        f"{what} after a backward that ended in an exception: the gradients that it left are of a part of the model "
        "only. Run the forward again, which drops them, and then its backward"
    )


def refuse_tracing(error: Exception) -> None:
    """Raises UsageError for a gather that failed since something traces the forward; any other error is left alone."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise UsageError(
            "torch.export, torch.onnx and torch.jit.trace can't take the gathers of a sharded model along. Export it "
            "before shard(), or export a model that is not sharded and has loaded zeroshard.full_state_dict(model)"
        ) from error


def refuse_transform(units: Iterable[Unit]) -> None:
    """Raises UsageError for a derivative by torch.func through parameters that are gone when it is taken."""
    if transforming() and torch.is_grad_enabled() and any(unit.plan.sharded for unit in units):
        raise UsageError(
            "a transform of torch.func (grad, vjp, jacrev, vmap with gradients) through a model whose parameters are "
            "sharded: its derivative is taken where no parameter is gathered. Use stage 2, or a recipe whose overrides "
            "keep the units concerned whole; for derivatives by the input at stage 3, torch.autograd.grad of the output"
        )

"""Refuses what can't work: a step after a failed backward, tracing, and derivatives of torch.func through shards.

Autograd runs its callback only at the end of a graph that succeeded. But the callback object lives exactly as long as
the graph runs, so a weak reference to it tells a failed backward from a running one. Rejected: catching exceptions in
the engine's `backward`, which does not see `loss.backward()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
from torch import nn

from zeroshard.engine.core.autograd import transforming
from zeroshard.engine.memory.unit import Unit
from zeroshard.errors import UsageError


class EndOfBackward:
    """The callback at the end of a graph. Autograd keeps it alive until the graph ends, with or without an error."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end()


def is_nested_call(module: nn.Module) -> bool:
    """Whether the call of `module` that has just begun is inside of another one, by the stack of this thread.

    torch runs no hooks after a call that a KeyboardInterrupt has ended, so that a forward may seem to run for good.
    """
    calls, frame = 0, inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name.startswith("torch_dynamo_resume_in"):
            return True  # compiled code, whose frames do not tell
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back
    return calls > 1


def refuse_half_done(what: str) -> NoReturn:
    """Raises UsageError: `what` was called after a backward that failed."""
    raise UsageError(
        f"{what} after a backward that ended in an exception: the gradients that it left are of a part of the model "
        "only. Run the forward again, which drops them, and then its backward"
    )


def refuse_tracing(error: Exception) -> None:
    """Raises UsageError if a gather failed because the forward is being traced; else does nothing."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise UsageError(
            "torch.export, torch.onnx and torch.jit.trace can't record the gathers of a sharded model. Export it "
            "before shard(), or export a model that is not sharded and has loaded zeroshard.full_state_dict(model)"
        ) from error


def refuse_transform(units: Iterable[Unit]) -> None:
    """Raises UsageError for a derivative by torch.func through sharded parameters, which are released before it."""
    if transforming() and torch.is_grad_enabled() and any(unit.plan.sharded for unit in units):
        raise UsageError(
            "a transform of torch.func (grad, vjp, jacrev, vmap with gradients) through a model whose parameters are "
            "sharded: its derivative is taken where no parameter is gathered. Use stage 2, or a recipe whose overrides "
            "keep the units concerned whole; for derivatives by the input at stage 3, torch.autograd.grad of the output"
        )

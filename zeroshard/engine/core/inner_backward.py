"""Supports backwards within a forward: `torch.autograd.grad` for forces, gradient penalties and inner loops.

Such an inner backward reads the parameters of the units that it passes, returns its results to its caller, and leaves
no gradients. So it advances no list and completes no unit: each unit is gathered when the backward reaches it, and at
its end the same units are in use as before. Each unit is gathered into its own slot, so the plan's bytes hold. The same
is true of an inner backward within a recomputation, which runs in the middle of the pass's own backward.

Rejected: a list of operations for it, which could gather ahead. Where a forward will differentiate, and how far down,
is not known when the plan is made.
"""

from __future__ import annotations

import weakref
from typing import NoReturn

import torch

from zeroshard.engine.core.autograd import graph_task
from zeroshard.engine.core.parameters import Parameters
from zeroshard.engine.memory.unit import Unit
from zeroshard.errors import UsageError


class InnerBackward:
    """Gathers units for inner backwards, and restores which units are in use when they end.

    Inner backwards may be nested, through recomputation.

    Args:
        units: all units of the model.
        parameters: gathers and releases them.
    """

    def __init__(self, units: list[Unit], parameters: Parameters) -> None:
        self._units = units
        self._parameters = parameters
        self._before: dict[int, list[int]] = {}

    @property
    def running(self) -> bool:
        """Whether the graph that is running is known to be an inner one."""
        return graph_task() in self._before

    def use(self, index: int) -> None:
        """Gather a unit that the running inner backward has reached."""
        task = graph_task()
        if task not in self._before:
            self._before[task] = [unit.index for unit in self._units if unit.in_use]
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        self._parameters.use(index)

    def _end(self, task: int) -> None:
        before = self._before.pop(task, None)
        if before is None:  # forgotten, after an exception
            return
        for unit in self._units:
            if unit.in_use and unit.index not in before:
                self._parameters.release(unit.index)
        for index in before:
            self._parameters.use(index)

    def forget(self) -> None:
        """Forget the running inner backwards, after a forward or backward ended in an exception."""
        self._before.clear()


def backward_ends_at(origin: weakref.ref[torch.Tensor]) -> bool:
    """Whether the running backward ends at a tensor because the tensor is one of its `inputs`.

    Called in a hook of the tensor. A tensor that no longer exists can't be an input.
    """
    tensor = origin()
    if tensor is None or tensor.grad_fn is None:
        return False
    further = [node for node, _ in tensor.grad_fn.next_functions if node is not None]
    try:
        return bool(further) and not any(torch._C._will_engine_execute_node(node) for node in further)
    except RuntimeError:  # torch raises this if the next node is a leaf among `inputs`, so the backward goes on
        return False


def refuse_backward_in_forward() -> NoReturn:
    """Raises UsageError."""
    raise UsageError(
        "backward() was called inside of the model's forward, where the gradients of its parameters can't be "
        "collected: call it on what the forward returns, or take gradients by inputs with torch.autograd.grad, which "
        "may be called anywhere in a forward"
    )


def refuse_sharded(unit: Unit) -> NoReturn:
    """Raises UsageError for a graph of gradients through a unit whose parameters will be gone when it is run."""
    # The nodes of that graph run before any hook of the next backward, when its weights are not gathered.
    raise UsageError(
        f"create_graph=True (a backward through a backward) through unit {unit.label!r} needs its parameters whole "
        "from here to the end of the next backward, but the plan shards them: use stage 2, or keep the units that this "
        "gradient comes through whole, by Recipe(overrides={unit: zeroshard.STAGES[2]}) or by leaving them out of "
        "units=[...], so that the root has them. (torch.func.grad, vjp and functional.jvp always create the graph; "
        "torch.autograd.grad without create_graph=True works here)"
    )

"""Backwards that a forward runs in its middle: `torch.autograd.grad` for forces, penalties, inner loops.

Such a backward reads the parameters of the units that it comes through, gives its results to its caller, and leaves no
gradient. So it moves no list and completes nothing: units are gathered when it comes to them, and when it has ended
the forward finds in use what it had in use before. A unit is in the slot that the plan gave it, so the plan's bytes
hold. The same goes for one inside of a recomputation, which lies in the middle of the pass's own backward.

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
    """The units that inner backwards have gathered, by graph: they may be nested, through recomputation.

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
        """The inner backward that is running comes to a unit."""
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
        """A forward or backward was ended by an exception."""
        self._before.clear()


def backward_ends_at(origin: weakref.ref[torch.Tensor]) -> bool:
    """Whether the backward that is running ends at a tensor, which it was asked for, and goes no further from there.

    Asked in a hook of the tensor. A tensor that nobody has any more can't have been asked for.
    """
    tensor = origin()
    if tensor is None or tensor.grad_fn is None:
        return False
    further = [node for node, _ in tensor.grad_fn.next_functions if node is not None]
    try:
        return bool(further) and not any(torch._C._will_engine_execute_node(node) for node in further)
    except RuntimeError:  # torch's answer for a leaf that it was asked for: it goes on to there
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
    # Its nodes run before any hook of the next backward, on weights that nobody has gathered by then.
    raise UsageError(
        f"create_graph=True (a backward through a backward) through unit {unit.label!r} needs its parameters whole "
        "from here to the end of the next backward, but the plan shards them: use stage 2, or keep the units that this "
        "gradient comes through whole, by Recipe(overrides={unit: zeroshard.STAGES[2]}) or by leaving them out of "
        "units=[...], so that the root has them. (torch.func.grad, vjp and functional.jvp always create the graph; "
        "torch.autograd.grad without create_graph=True works here)"
    )

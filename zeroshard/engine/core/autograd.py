"""Questions about the current state of autograd: is a graph running, which one, and which tensors get gradients?

The answers come from autograd itself. Rejected: counting in hooks of the engine. A recomputation, `torch.autograd.grad`
and a backward that starts in the middle of the model run at places where the engine has no hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident

import torch
from torch._C._functorch import maybe_current_level

from zeroshard.sharding.resting import unguarded


def graph_task() -> int:
    """The number of the autograd graph that this thread is running; -1 if it runs none."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether this thread is running an autograd graph (a recomputation runs modules inside of one)."""
    return graph_task() != -1


def transforming() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) is running, which has an autograd of its own."""
    return torch._C._are_functorch_transforms_active()


class NodeOrder:
    """Tells whether the nodes of a graph run in the reverse order of their creation.

    Each thread numbers the nodes that it creates. On a GPU backwards run on a thread of their own. Nodes that a
    backward with create_graph creates there can't be ordered against nodes of the forward, so their numbers say
    nothing.
    """

    def __init__(self) -> None:
        self._forward_thread = get_ident()
        self._after_backward: tuple[int, int] | None = None

    def forward_begins(self) -> None:
        """Remember that this thread creates the nodes of the forward."""
        self._forward_thread = get_ident()

    def holds(self) -> bool:
        """At the begin of a backward: whether the forward's thread created all nodes since the last backward."""
        here, made = get_ident(), torch.autograd._get_sequence_nr()
        if here == self._forward_thread:
            return True
        return not torch.is_grad_enabled() and (made == 0 or self._after_backward == (here, made))

    def backward_ends(self) -> None:
        """At the end of a backward: the nodes that its thread created so far belong to recomputations."""
        self._after_backward = get_ident(), torch.autograd._get_sequence_nr()


def accumulates(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the running backward accumulates gradients into any of the parameters.

    `torch.autograd.grad` does not: it returns gradients to its caller, so there is nothing to reduce. All ranks make
    the same calls. A backward without `inputs` always accumulates. It can't be asked for single parameters: if all
    trained parameters lie in reentrant checkpoints, their nodes are in other graphs. In a transform of torch.func
    (grad, vjp) parameters are constants, and the results are returned.
    """
    if maybe_current_level() is not None:
        return False
    if torch.autograd._is_checkpoint_valid():
        return True
    with unguarded():  # to ask torch for the node of a resting parameter is no read of its values
        for parameter in parameters:
            if parameter.requires_grad:
                try:
                    if torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node):
                        return True
                except RuntimeError:  # torch raises this for a leaf that is an input of autograd.grad
                    return False
    return False


def tensor_to_hook(tensor: torch.Tensor, since: int) -> torch.Tensor:
    """The tensor whose hook sees the gradient of `tensor`: for a view its base, if that was made at `since` or later.

    An in-place change of a view (`out[..., :2] += x`) makes it a view of the changed base. Autograd then never runs the
    node that the view had before, but it does run the node of the base.
    """
    base = tensor._base
    made_since = base is not None and base.grad_fn is not None and node_number(base) >= since
    return base if base is not None and made_since else tensor


def node_number(tensor: torch.Tensor) -> int:
    """The number of the node that created the tensor; -1 for a leaf."""
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()

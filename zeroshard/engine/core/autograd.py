"""Questions about the current state of autograd: is a graph running, which one, and which tensors get gradients?

The answers come from autograd itself. Rejected: counting in hooks of the engine. A recomputation, `torch.autograd.grad`
and a backward that starts in the middle of the model run at places where the engine has no hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


Made = tuple[int, int]
"""A thread, and the number of nodes that it has created so far."""


class NodeOrder:
    """Tells whether the nodes of a graph run in the reverse order of their creation.

    Each thread numbers the nodes that it creates. On a GPU backwards run on a thread of their own. Nodes that a
    backward with create_graph creates there can't be ordered against nodes of the forward, so their numbers say
    nothing. Nodes that were there before the forward are of no account: those of recomputations, by this model or by
    another one. How many these are is known from the end of the model's last backward; where backwards of other models
    run between, it is asked for at the begin of the forward.

    Args:
        ask: gives what the thread of backwards has made so far; None where the caller's own thread runs them.
    """

    def __init__(self, ask: Callable[[], Made] | None = None) -> None:
        self._ask = ask
        self._forward_thread = get_ident()
        self._before: Made | None = None
        self._others = False

    def forward_begins(self, *, first: bool) -> None:
        """Remember that this thread creates the nodes of the forward.

        Args:
            first: whether it is the first one since the last backward, and one that builds a graph.
        """
        self._forward_thread = get_ident()
        if first and self._ask is not None and (self._before is None or self._others):
            self._before = self._ask()

    def holds(self) -> bool:
        """At the begin of a backward: whether the forward's thread created all nodes since the forward began."""
        here, made = get_ident(), torch.autograd._get_sequence_nr()
        if here == self._forward_thread:
            return True
        known = made == 0 or self._before == (here, made)
        self._others = self._others or not known
        return known and not torch.is_grad_enabled()

    def backward_ends(self) -> None:
        """At the end of a backward: the nodes that its thread created so far belong to recomputations."""
        self._before = get_ident(), torch.autograd._get_sequence_nr()


def made_by_backwards(device: torch.device) -> Made:
    """What the thread that runs backwards on `device` has made so far, as a backward of one node there tells."""
    found: list[Made] = []
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        leaf = torch.zeros((), device=device, requires_grad=True)
        leaf.register_hook(lambda _: found.append((get_ident(), torch.autograd._get_sequence_nr())))
        torch.autograd.backward(leaf.view(()))
    return found[0]


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

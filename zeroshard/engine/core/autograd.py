"""What autograd is doing just now: whether a graph runs, which one, and what it gives a gradient to.

Read from autograd itself. Rejected: keeping count in hooks of the engine. A recomputation, `torch.autograd.grad` and a
backward that starts in the middle of the model come at places where no hook of the engine is.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident

import torch
from torch._C._functorch import maybe_current_level


def graph_task() -> int:
    """The number of the autograd graph that this thread is running just now, -1 outside of one."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether this thread is running an autograd graph just now (a recomputation runs modules inside of one)."""
    return graph_task() != -1


def transforming() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) is running, which has an autograd of its own."""
    return torch._C._are_functorch_transforms_active()


class NodeOrder:
    """Whether the nodes of a graph run in the reverse order of their creation: each thread numbers those it makes.

    Backwards run on a thread of their own where the device is a GPU. What a backward with create_graph makes there has
    no order with what forwards made, so that nothing can be told from which node is due.
    """

    def __init__(self) -> None:
        self._forward_thread = get_ident()
        self._after_backward: tuple[int, int] | None = None

    def forward_begins(self) -> None:
        """This thread makes the nodes of the forward."""
        self._forward_thread = get_ident()

    def kept(self) -> bool:
        """When a backward begins, on its thread: whether all nodes since the last one come from the forward's."""
        here, made = get_ident(), torch.autograd._get_sequence_nr()
        if here == self._forward_thread:
            return True
        return not torch.is_grad_enabled() and (made == 0 or self._after_backward == (here, made))

    def backward_ends(self) -> None:
        """What this thread has made by now was made by the backward for itself, in recomputations."""
        self._after_backward = get_ident(), torch.autograd._get_sequence_nr()


def accumulates(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the backward that is running gives any of the parameters a gradient: torch.autograd.grad does not.

    It hands what was asked for to its caller, so there is nothing to reduce. All ranks make the same calls. A backward
    that was not told what to compute gives them theirs, and is not asked more: nodes that a reentrant checkpoint makes
    are in a graph of their own, so where all that is trained lies in checkpoints this graph has none of them.
    A transform of torch.func (grad, vjp) runs a graph in which parameters are constants, and hands over its results.
    """
    if maybe_current_level() is not None:
        return False
    if torch.autograd._is_checkpoint_valid():
        return True
    for parameter in parameters:
        if parameter.requires_grad:
            try:
                if torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node):
                    return True
            except RuntimeError:  # torch's answer for a leaf that autograd.grad was asked for
                return False
    return False


def tensor_to_hook(tensor: torch.Tensor, since: int) -> torch.Tensor:
    """The tensor to hook for the gradient of `tensor`: of a view its base, if that was made at number `since` or later.

    What changes a view in place (`out[..., :2] += x`) makes it a view of the changed base, and autograd never comes
    to the node that it had before; to the base's it does.
    """
    base = tensor._base
    made_since = base is not None and base.grad_fn is not None and node_number(base) >= since
    return base if base is not None and made_since else tensor


def node_number(tensor: torch.Tensor) -> int:
    """When the tensor was made, by autograd's count of nodes; nobody made a leaf."""
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()

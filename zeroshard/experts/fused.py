"""Modules that hold all experts of a layer in weights with a dim for the experts, and get tokens with their choice.

    module(hidden_states, top_k_index, top_k_weights)      transformers' interface: MixtralExperts and its kin
    divided over two ranks of four experts                 each has weights of two; rows of all ranks come to it

The module's own forward computes what arrives, with its own kernels (grouped products, one expert after the other): to
it the local experts are all there are, and each row has one. So no model is known here. Weights of the choice are
applied where the token is, in the order of its experts. Rejected: a forward of our own for the layouts that there are
(gates beside or between, biases, transposed weights), of which the next model has another.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from zeroshard.experts.dispatch import Exchanging, attached, local_part, make_dispatch

_COUNT = "num_experts"
_CALLS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") or "_hooks_" in name)


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Path, module and number of experts of all modules of this kind."""
    for path, module in model.named_modules():
        count = vars(module).get(_COUNT)
        parameters = list(module.parameters(recurse=False))
        if not isinstance(count, int) or not parameters or not _is_called_so(module):
            continue
        if all(parameter.ndim > 1 and parameter.shape[0] == count for parameter in parameters):
            yield path, module, count


def _is_called_so(module: nn.Module) -> bool:
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    return names in _CALLS


def send_tokens(module: nn.Module, experts: int, group: dist.ProcessGroup) -> None:
    """Let a module whose parameters are this rank's part of all experts compute what all ranks have for it.

    Args:
        experts: of all ranks.
    """
    send_by(module, experts // group.size(), lambda pairs: make_dispatch(pairs, experts, group))


def send_by(module: nn.Module, local: int, dispatch_of: Callable[[torch.Tensor], Exchanging]) -> None:
    """The same with any way of sending.

    Args:
        local: experts of this rank.
        dispatch_of: from the expert of each pair of a token and an expert, where the rows go.
    """
    part = _on_local_experts(module, local)

    def forward(hidden_states: torch.Tensor, *choice: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        chosen, weights = (*choice, *named.values())
        dispatch = dispatch_of(chosen.reshape(-1))
        rows = dispatch.there(hidden_states[dispatch.order // chosen.shape[-1]])
        own = {name: local_part(parameter) for name, parameter in module.named_parameters(recurse=False)}
        if rows.shape[0]:
            made = functional_call(part, own, (rows, dispatch.experts.unsqueeze(-1), rows.new_ones((len(rows), 1))))
        else:
            made = attached(rows, *own.values())
        # What ranks make of rows has their dtype on all of them, also where autocast lets experts give another.
        returned = dispatch.back(made.to(rows.dtype))
        weighted = returned.view(*chosen.shape, returned.shape[-1]) * weights.unsqueeze(-1)
        return weighted.sum(dim=-2).to(hidden_states.dtype)

    vars(module)["forward"] = forward


def _on_local_experts(module: nn.Module, local: int) -> nn.Module:
    """A copy of the module without values and hooks, for which the local experts are all there are."""
    part = copy.copy(module)
    vars(part).update({name: OrderedDict() for name in _HOOKS if isinstance(vars(part).get(name), OrderedDict)})
    vars(part)[_COUNT] = local
    part._parameters = {name: nn.Parameter(torch.empty(0, device="meta")) for name in module._parameters}
    return part

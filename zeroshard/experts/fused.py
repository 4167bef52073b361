"""Modules that hold all experts of a layer in weights with a dim for the experts, and get tokens with their choice.

    module(hidden_states, top_k_index, top_k_weights)      transformers' interface: MixtralExperts and its kin
    divided over two ranks of four experts                 each has weights of two; rows of all ranks come to it

The module's own forward computes what arrives, with its own kernels (grouped products, one expert after the other): to
it the local experts are all there are, and each row has one. So no model is known here. Weights of the choice are
applied where the token is, in the order of its experts. Rejected: a forward of our own for the layouts that there are
(gates beside or between, biases, transposed weights), of which the next model has another.

Rows of an expert come in the order in which the module itself would have taken them: a forward that goes through its
experts one after the other takes all first choices before the second ones, a grouped product takes token after token.
Under `torch.use_deterministic_algorithms(True)` every sum is made in that forward's order, too.
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

from zeroshard.experts.dispatch import Exchanging, attached, compute_arrived, local_part, make_dispatch

_COUNT = "num_experts"
_CALLS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
_UNTRACED = "tokens are sent to the ranks of their experts outside of compiled code. Compile it without fullgraph=True"
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
        one_by_one = _goes_one_by_one(module)
        if one_by_one:
            chosen, weights = chosen.T, weights.T
        dispatch = dispatch_of(chosen.reshape(-1))
        tokens = dispatch.order % len(hidden_states) if one_by_one else dispatch.order // chosen.shape[-1]
        rows = dispatch.there(_rows(hidden_states, tokens, from_last=one_by_one))
        own = {name: local_part(parameter) for name, parameter in module.named_parameters(recurse=False)}

        def compute(some: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
            return functional_call(part, own, (some, experts.unsqueeze(-1), some.new_ones((len(some), 1))))

        made = compute_arrived(dispatch, rows, compute) if rows.shape[0] else attached(rows, *own.values())
        # What ranks make of rows has their dtype on all of them, also where autocast lets experts give another.
        returned = dispatch.back(made.to(rows.dtype))
        weighted = returned.view(*chosen.shape, returned.shape[-1]) * weights.unsqueeze(-1)
        if one_by_one and torch.are_deterministic_algorithms_enabled():
            return _summed_by_expert(weighted, chosen, hidden_states.dtype)
        return weighted.sum(dim=0 if one_by_one else 1).to(hidden_states.dtype)

    # The sizes of what is sent come to the host, and weights rest without storage until their unit is gathered.
    vars(module)["forward"] = torch.compiler.disable(forward, reason=_UNTRACED)


def _goes_one_by_one(module: nn.Module) -> bool:
    """Whether the module's own forward goes through its experts in turn: unless transformers is to take another."""
    named = getattr(vars(module).get("config"), "_experts_implementation", None)
    return named in (None, "eager")


def _rows(hidden_states: torch.Tensor, tokens: torch.Tensor, *, from_last: bool) -> torch.Tensor:
    """A row for each pair; `from_last`: gradients are summed from the last expert to the first, as autograd does."""
    if from_last and torch.are_deterministic_algorithms_enabled():
        return hidden_states[tokens.flip(0)].flip(0)
    return hidden_states[tokens]


def _summed_by_expert(weighted: torch.Tensor, chosen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over the first dim of (k, tokens, width), for each token in the order of its experts' numbers."""
    places = chosen.argsort(dim=0).unsqueeze(-1).expand_as(weighted)
    first, *others = weighted.gather(0, places).to(dtype).unbind()
    for other in others:
        first = first + other
    return first


def _on_local_experts(module: nn.Module, local: int) -> nn.Module:
    """A copy of the module without values and hooks, for which the local experts are all there are."""
    part = copy.copy(module)
    vars(part).update({name: OrderedDict() for name in _HOOKS if isinstance(vars(part).get(name), OrderedDict)})
    vars(part)[_COUNT] = local
    part._parameters = {name: nn.Parameter(torch.empty(0, device="meta")) for name in module._parameters}
    return part

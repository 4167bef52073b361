"""Experts of any module, as one module whose parameters have a dim for the experts in front.

    expert (a module)     fc.weight [out, in]       ->      experts     module.fc.weight [experts, out, in]

The module itself computes, with one slice of each parameter after the other in the place of its own. So a checkpoint
has whole experts, whichever ranks had them, and over an axis `ep` the parameters are divided along that dim as those of
models with 3-D weights are. Rejected: a list of modules on each rank. What one rank calls expert 0 is another than what
the next one does, and checkpoints would have to say which.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from zeroshard.errors import UsageError
from zeroshard.experts.dispatch import Dispatch, attached, compute_arrived, local_part, make_dispatch
from zeroshard.experts.gating import Choice
from zeroshard.sharding.dtensors import as_dtensor
from zeroshard.sharding.marks import set_z3_leaf_module


class StackedExperts(nn.Module):
    """Copies of a module, as experts.

    Args:
        expert: from rows to as many rows of the same width; of a tuple that it gives the first is taken.
        experts: how many.
        ranks: over which `initialize` is to divide them; 1 leaves that to the mesh.
    """

    def __init__(self, expert: nn.Module, experts: int, ranks: int = 1) -> None:
        super().__init__()
        self.num_experts, self.ranks = experts, ranks
        self.deepspeed_experts = copy.deepcopy(expert)
        stacks: dict[int, nn.Parameter] = {}
        for module in self.deepspeed_experts.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in stacks:
                    stack = parameter.detach().unsqueeze(0).repeat(experts, *(1 for _ in parameter.shape))
                    stacks[id(parameter)] = nn.Parameter(stack, requires_grad=parameter.requires_grad)
                module._parameters[name] = stacks[id(parameter)]
        if not stacks:
            raise UsageError(f"experts of {type(expert).__name__}: it has no parameters, so all experts are the same")
        set_z3_leaf_module(
            self, True
        )  # outside of blocks too, its parameters are gathered for its own forward, not for parts of it

    def forward(self, rows: torch.Tensor, choice: Choice) -> torch.Tensor:
        """What the experts that (tokens, width) chose make of them, weighted and summed for each token."""
        tokens, k = choice.experts.shape
        kept = choice.kept.reshape(-1).nonzero().squeeze(-1)
        dispatch = make_dispatch(choice.experts.reshape(-1)[kept], self.num_experts, self._group())
        made = self._of_all(dispatch, dispatch.there(rows[kept[dispatch.order] // k]))
        returned = dispatch.back(made)
        whole = returned.new_zeros(tokens * k, returned.shape[-1]).index_copy(0, kept, returned)
        weighted = whole.view(tokens, k, -1) * choice.weights.unsqueeze(-1).to(whole.dtype)
        return weighted.sum(dim=1)

    def _of_all(self, dispatch: Dispatch, rows: torch.Tensor) -> torch.Tensor:
        """What comes to this rank, through its experts."""
        stacks = {name: local_part(parameter) for name, parameter in self.deepspeed_experts.named_parameters()}
        if not rows.shape[0]:
            return attached(rows, *stacks.values())
        return compute_arrived(dispatch, rows, lambda some, experts: self._of_experts(some, experts, stacks))

    def _of_experts(self, rows: torch.Tensor, experts: torch.Tensor, stacks: dict[str, torch.Tensor]) -> torch.Tensor:
        """Rows through this rank's experts one after the other."""
        order = torch.argsort(experts, stable=True)
        local = next(iter(stacks.values())).shape[0]
        parts = rows[order].split(torch.bincount(experts, minlength=local).tolist())
        slices = {name: stack.unbind() for name, stack in stacks.items()}
        made: list[torch.Tensor] = []
        for number, part in enumerate(parts):
            if part.shape[0]:
                own = {name: values[number] for name, values in slices.items()}
                found = functional_call(self.deepspeed_experts, own, (part,))
                made.append((found[0] if isinstance(found, tuple) else found).to(rows.dtype))
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device)
        return torch.cat(made)[places]

    def _group(self) -> dist.ProcessGroup | None:
        """The ranks over which the experts are divided; None where this rank has all of them."""
        divided = as_dtensor(next(self.deepspeed_experts.parameters()))
        return None if divided is None else divided.device_mesh.get_group()

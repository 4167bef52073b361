"""A layer that is a mixture of experts, as DeepSpeed's scripts build it."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

from deepspeed._exports import lazy
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from zeroshard.engine.build import default_device
from zeroshard.errors import UsageError
from zeroshard.experts.divide import divide_as_stacked
from zeroshard.experts.stacked import StackedExperts

__getattr__, __dir__ = lazy(__name__, {})


class MoE(nn.Module):
    """Copies of `expert`, of which each token uses k.

    Over `ep_size` neighbouring ranks the experts are divided: at once where there is a process group, else by
    `initialize`. These ranks read different data and send each other tokens.

    Args:
        hidden_size: width of tokens.
        expert: from tokens to tokens.
        num_experts: of all ranks.
        k: experts of each token.
        capacity_factor, eval_capacity_factor: how many times its even share of tokens an expert takes; with
            `drop_tokens` those beyond go to no expert.
        min_capacity: tokens that an expert takes at least.
        use_residual: a further copy sees all tokens, and a learned share of both is the result.
        noisy_gate_policy: 'Jitter' multiplies what the gate reads, 'RSample' draws the expert of k=1.
        use_rts: with k=1 the tokens that are left out are drawn, in place of the last ones.
        use_tutel: is accepted; tokens are exchanged in the same way.
        enable_expert_tensor_parallelism: must be False.
        top2_2nd_expert_sampling: with k=2 the second expert is drawn.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if enable_expert_tensor_parallelism:
            raise UsageError("enable_expert_tensor_parallelism=True: an expert is whole on one rank; leave it False")
        if ep_size < 1 or num_experts % ep_size:
            raise UsageError(f"MoE(num_experts={num_experts}, ep_size={ep_size}): each rank has as many experts")
        self.use_residual, self.num_experts, self.ep_size = use_residual, num_experts, ep_size
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        experts = StackedExperts(expert, num_experts, ep_size)
        for parameter in experts.parameters():
            vars(parameter).update(allreduce=False, group_name=self.expert_group_name)
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(gate, experts)
        if use_residual:
            self.mlp = copy.deepcopy(expert)
            self.coefficient = nn.Linear(hidden_size, 2)
        if dist.is_available() and dist.is_initialized():
            divide_as_stacked(self, default_device().type)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Divide the experts, where there was no process group before.

        Raises:
            UsageError: ranks that are not neighbours are asked for.
        """
        if use_data_before_expert_parallel_:
            raise UsageError("use_data_before_expert_parallelism: the ranks that share experts are neighbours")
        divide_as_stacked(self, default_device().type)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The result, the loss that makes the choice of experts even, and how many tokens chose each expert."""
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            beside = self.mlp(hidden_states)
            beside = beside[0] if isinstance(beside, tuple) else beside
            shares = torch.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * shares[..., :1] + beside * shares[..., 1:]
        auxiliary, counts = self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
        assert auxiliary is not None
        assert counts is not None
        return output, auxiliary, counts

"""The gate and the layer of a mixture of experts, under DeepSpeed's names for what they hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed._exports import lazy
from zeroshard.errors import UsageError
from zeroshard.experts.gating import Choice, capacity_of, choose
from zeroshard.experts.stacked import StackedExperts

__getattr__, __dir__ = lazy(__name__, {})
POLICIES = (None, "None", "Jitter", "RSample")
_JITTER = 1e-2


class TopKGate(nn.Module):
    """Chooses k experts for each token; arguments as those of `MoE`."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if noisy_gate_policy not in POLICIES:
            raise UsageError(f"noisy_gate_policy {noisy_gate_policy!r}: None, 'Jitter' and 'RSample' are there")
        if not 1 <= k <= num_experts:
            raise UsageError(f"k={k} of {num_experts} experts: a token chooses at least 1 and at most all")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.num_experts = k, num_experts
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.drop_tokens = min_capacity, drop_tokens
        self.noisy_gate_policy, self.use_rts = noisy_gate_policy, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> Choice:
        """The choice of (tokens, width), made in float32."""
        rows = tokens.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            rows = rows * torch.empty_like(rows).uniform_(1 - _JITTER, 1 + _JITTER)
        with torch.autocast(rows.device.type, enabled=False):
            logits = F.linear(rows, self.wg.weight.float())
        noisy = self.noisy_gate_policy == "RSample" and self.training
        sampled = self.k == 2 and self.top2_2nd_expert_sampling
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = capacity_of(len(rows), self.num_experts, self.k, factor, self.min_capacity)
        return choose(
            logits,
            self.k,
            capacity if self.drop_tokens else None,
            by=_noisy(logits) if noisy and self.k == 1 else None,
            second_by=_noisy(logits) if sampled else None,
            used=used_token,
            at_random=self.use_rts and self.k == 1,
        )


def _noisy(logits: torch.Tensor) -> torch.Tensor:
    """Logits with Gumbel noise, the largest of which is a draw by their probabilities."""
    return logits.detach() - torch.empty_like(logits).exponential_().log()


class MOELayer(nn.Module):
    """A gate and experts."""

    def __init__(self, gate: TopKGate, experts: StackedExperts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.l_aux: torch.Tensor | None = None
        self.exp_counts: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None) -> torch.Tensor:
        """What each token's experts make of it."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        choice = self.gate(rows, used_token)
        self.l_aux, self.exp_counts = choice.auxiliary, choice.counts
        return self.experts(rows, choice).view_as(hidden_states)

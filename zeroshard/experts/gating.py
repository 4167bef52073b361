"""Which experts each token goes to, with what weight, and who is left out where an expert takes only so many.

    logits (tokens, experts) -> softmax -> the k largest of each token -> at most `capacity` tokens for each expert

Top-1 is that of Switch (Fedus et al. 2021, arXiv:2101.03961), top-2 that of GShard (Lepikhin et al. 2020,
arXiv:2006.16668): second choices come after all first ones, and weights of a token's experts add up to 1. With more
choices the most probable ones stay. The auxiliary loss is E * sum over experts of the mean probability times the share
of tokens: 1 where all is even. Rejected: masks of (tokens, experts, capacity), whose size grows with all three.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Choice:
    """What a gate says of tokens.

    Attributes:
        experts: (tokens, k).
        weights: (tokens, k); 0 for those that are left out.
        kept: (tokens, k), whether the token goes to the expert.
        auxiliary: the loss that makes the choice even.
        counts: tokens that chose each expert, those that are left out included.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    kept: torch.Tensor
    auxiliary: torch.Tensor
    counts: torch.Tensor


def capacity_of(tokens: int, experts: int, k: int, factor: float, least: int) -> int:
    """How many tokens an expert takes, `factor` times its even share."""
    return max(math.ceil(tokens * k / experts * factor), least)


def choose(
    logits: torch.Tensor,
    k: int,
    capacity: int | None,
    *,
    by: torch.Tensor | None = None,
    second_by: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
    at_random: bool = False,
) -> Choice:
    """Choose k experts for each token.

    Args:
        logits: (tokens, experts), in float32.
        capacity: tokens that an expert takes at most; None is any number.
        by: what the choice is made by, in place of the logits: these with noise.
        second_by: what the second of two experts is chosen by.
        used: (tokens,), 0 for those that are in no sequence and go nowhere.
        at_random: which tokens are left out is drawn, in place of the last ones.
    """
    probabilities = F.softmax(logits, dim=1)
    chosen = _chosen(probabilities if by is None else by, k, second_by)
    use = torch.ones_like(chosen, dtype=torch.bool)
    if used is not None:
        use = (used.reshape(-1, 1) != 0).expand_as(chosen)
    own = probabilities.gather(1, chosen)
    kept = use if capacity is None else use & _within(chosen, use, own.detach(), capacity, at_random=at_random)
    weights = own * kept
    if k > 1:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    counted = F.one_hot(chosen, logits.shape[1]) * use.unsqueeze(-1)
    shares = counted[:, 0] if k <= 2 else counted.sum(dim=1) / k
    auxiliary = logits.shape[1] * (probabilities.mean(dim=0) * shares.to(probabilities.dtype).mean(dim=0)).sum()
    return Choice(chosen, weights, kept, auxiliary, counted.sum(dim=(0, 1)))


def _chosen(by: torch.Tensor, k: int, second_by: torch.Tensor | None) -> torch.Tensor:
    if k == 2 and second_by is not None:
        first = by.argmax(dim=1, keepdim=True)
        others = second_by.scatter(1, first, -math.inf)
        return torch.cat((first, others.argmax(dim=1, keepdim=True)), dim=1)
    return by.topk(k, dim=1).indices


def _within(
    chosen: torch.Tensor, use: torch.Tensor, probabilities: torch.Tensor, capacity: int, *, at_random: bool
) -> torch.Tensor:
    """Whether each choice is among the first `capacity` of its expert."""
    tokens, k = chosen.shape
    experts = torch.where(use, chosen + 1, 0).T.reshape(-1)  # what goes nowhere is in nobody's way
    if at_random:
        turns = torch.rand(k, tokens, device=chosen.device).add(torch.arange(k, device=chosen.device)[:, None])
        turn = turns.reshape(-1).argsort()
    elif k > 2:
        turn = probabilities.T.reshape(-1).argsort(descending=True, stable=True)
    else:
        turn = torch.arange(k * tokens, device=chosen.device)
    sorted_by = turn[experts[turn].argsort(stable=True)]
    counts = torch.bincount(experts)
    begins = counts.cumsum(0) - counts
    places = torch.empty_like(sorted_by)
    places[sorted_by] = torch.arange(k * tokens, device=chosen.device) - begins[experts[sorted_by]]
    return (places < capacity).view(k, tokens).T

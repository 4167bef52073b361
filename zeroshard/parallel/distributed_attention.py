"""An attention module that exchanges around another one, for models whose attention is their own.

    query, key, value   (tokens of this rank, samples, all heads, width)
    inside              (all tokens, samples, some heads, width)

The arguments are those of DeepSpeed's module, so that models written for it run. Rejected: finding the dims of tokens
and heads by their sizes, which may be equal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.errors import PlanError, UsageError
from zeroshard.parallel.exchange import exchange
from zeroshard.parallel.heads import check_heads, key_copies


class DistributedAttention(nn.Module):
    """Runs `local_attention(query, key, value, *args, **kwargs)` on the whole sequence and some of the heads.

    Args:
        local_attention: returns a tensor that is laid out as its queries are, with heads and width apart.
        sequence_process_group: the ranks that have parts of a sequence.
        scatter_idx: the dim of heads.
        gather_idx: the dim of tokens.
        sp_stream: not needed: exchanges run on the stream of the forward, in whose order they are needed.
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int | None = None,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of this rank's tokens to the whole sequence.

        Args:
            batch_dim_idx: the dim of samples: neither of tokens nor of heads.
            rotary_pos_emb: must be None; turn queries and keys before, by the positions of this rank's tokens.

        Raises:
            PlanError: the heads don't divide.
        """
        if rotary_pos_emb is not None:
            raise UsageError(
                "DistributedAttention(rotary_pos_emb=...): apply it to query and key before, for the positions of this "
                "rank's part of the sequence"
            )
        heads_dim, tokens_dim, ranks = self.scatter_idx, self.gather_idx, self.spg.size()
        if batch_dim_idx is not None and batch_dim_idx % query.dim() in (heads_dim, tokens_dim):
            raise PlanError(f"DistributedAttention: dim {batch_dim_idx} can't be both samples and tokens or heads")
        heads, key_heads = query.shape[heads_dim], key.shape[heads_dim]
        check_heads(heads, key_heads, ranks, "DistributedAttention")
        copies = key_copies(heads, key_heads, ranks)
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=heads_dim) for tensor in (key, value))
        parts = (exchange(tensor, self.spg, heads_dim, tokens_dim) for tensor in (query, key, value))
        mixed = self.local_attn(*parts, *args, **kwargs)
        return exchange(mixed, self.spg, tokens_dim, heads_dim)

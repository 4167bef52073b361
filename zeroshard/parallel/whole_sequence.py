"""What a rank knows of the sequence of which it has a part: where its tokens stand, which are padding, which documents.

    rank 0   positions 0 1 2 3         whole   positions   0 1 2 3 4 0 1 2
    rank 1   positions 4 0 1 2                 documents   0 0 0 0 0 1 1 1

Gathered once for each forward of a model; a few numbers for each token. Rejected: gathering it in every layer, and
masks made of a part alone, which are wrong as soon as attention sees the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.errors import UsageError
from zeroshard.parallel.exchange import gather_parts

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""transformers' form of a mask: batch, head, query, key -> whether the query attends to the key."""


@dataclass(frozen=True)
class Part:
    """This rank's part of a batch of sequences.

    Attributes:
        samples, tokens: its shape.
        positions: of its tokens, (samples or 1, tokens); None for those of one document that fills the sequence.
        padding: (samples, tokens), 0 where a token is padding; None for no padding.
        digest: one number of the tokens, by which ranks see that all have the same; None or 0 where it says nothing.
    """

    samples: int
    tokens: int
    device: torch.device
    positions: torch.Tensor | None
    padding: torch.Tensor | None
    digest: torch.Tensor | None = None


@dataclass(frozen=True)
class WholeSequence:
    """What ranks have put together of their parts.

    Attributes:
        own: positions of this rank's tokens.
        positions, padding: of the whole, (samples, tokens).
        documents: number of each token's document; None where each sequence is one.
    """

    own: torch.Tensor
    positions: torch.Tensor
    padding: torch.Tensor | None
    documents: torch.Tensor | None

    @property
    def tokens(self) -> int:
        """Of all parts."""
        return self.positions.shape[1]

    def within_documents(self, mask: MaskFunction) -> MaskFunction:
        """A mask of positions in a document, for tokens of the whole; to other documents nobody attends."""
        positions, documents = self.positions, self.documents
        assert documents is not None

        def masked(batch: Any, head: Any, query: Any, key: Any) -> Any:
            seen = mask(batch, head, positions[batch, query], positions[batch, key])
            return seen & (documents[batch, query] == documents[batch, key])

        return masked


def put_together(part: Part, group: dist.ProcessGroup, *, packed: bool) -> WholeSequence:
    """The whole of the ranks' parts; called by all ranks of `group`.

    Args:
        packed: positions that don't go on begin a document of their own.

    Raises:
        UsageError: on every rank, where the parts differ in shape or kind.
    """
    _check_alike(part, group)
    own = part.positions
    if own is None:
        own = torch.arange(part.tokens, device=part.device) + group.rank() * part.tokens
        own = own.unsqueeze(0)
    own = own.expand(part.samples, part.tokens)
    positions = gather_parts(own.to(torch.int64), group, 1)
    padding = None if part.padding is None else gather_parts(part.padding.to(torch.int64), group, 1).bool()
    documents = _documents(positions) if packed and padding is None else None
    return WholeSequence(own, positions, padding, documents)


def _documents(positions: torch.Tensor) -> torch.Tensor | None:
    begins = torch.diff(positions, dim=1, prepend=positions[:, :1] - 1) != 1
    return begins.cumsum(1) if bool(begins.any()) else None


def digest_of(tokens: torch.Tensor) -> torch.Tensor:
    """A number of the tokens, or of their embeddings; 0 where each row repeats one, as any part of it does."""
    rows = tokens.detach().reshape(*tokens.shape[:2], -1)
    rows = rows.double().sum(-1).view(torch.int64) if tokens.is_floating_point() else rows.sum(-1)
    places = torch.arange(1, rows.numel() + 1, device=rows.device)
    digest = (rows.reshape(-1).to(torch.int64) * (2 * places + 1)).sum() | 1
    return digest * (rows != rows[:, :1]).any()


def have_same(tokens: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of `group` have the same tokens, of shape (samples, tokens, ...); called by all of them."""
    digests: list[int] = gather_parts(digest_of(tokens).reshape(1), group, 0).tolist()
    return _are_same(digests)


def _are_same(digests: Sequence[int]) -> bool:
    return digests[0] != 0 and all(digest == digests[0] for digest in digests)


def _check_alike(part: Part, group: dist.ProcessGroup) -> None:
    """All ranks have parts of one shape, else an exchange would not fit, or wait for ever; and not the same tokens."""
    own = torch.tensor(
        [part.samples, part.tokens, part.padding is not None, part.positions is not None, 0],
        dtype=torch.int64,
        device=part.device,
    )
    if part.digest is not None:
        own[-1] = part.digest
    *numbers, digests = gather_parts(own.unsqueeze(0), group, 0).t().tolist()
    rows = list(zip(*numbers, strict=True))
    if any(row != rows[0] for row in rows):
        shown = "; ".join(
            f"rank {rank}: {samples} x {tokens}{', attention_mask' * mask}{', position_ids' * positions}"
            for rank, (samples, tokens, mask, positions) in enumerate(rows)
        )
        raise UsageError(
            f"the ranks of a sequence have parts of different shapes (samples x tokens: {shown}); give each of the "
            f"{group.size()} ranks a part of equal length of the same batch, as UlyssesSPDataLoaderAdapter does"
        )
    if _are_same(digests):
        raise UsageError(
            f"all {group.size()} ranks of a sequence were given the same {part.tokens} tokens: that is the whole "
            "sequence, of which each rank takes a part (UlyssesSPDataLoaderAdapter cuts batches, for evaluation too). "
            "To evaluate on whole sequences, say UlyssesSPAttentionHF.register_with_transformers(disable_in_eval=True)"
        )

"""Work on a sequence in tiles, so that what it makes of the whole sequence never stands at once.

    hidden   [ tile ] [ tile ] [ tile ]      the loss of a tile: its logits are made, used and dropped
    loss        sum      sum      sum        backward: each tile's logits are made anew, one tile at a time

Each tile is a checkpointed call: what it makes is dropped after the forward and made again when its gradient is due
(ALST, arXiv 2506.13996). So parameters get one gradient, summed by autograd over the tiles, and ZeRO sees what it sees
of any checkpointed block. Rejected: gradients made in the forward already, which saves one product in four, but has
gradients of gathered parameters at a moment when no engine collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from zeroshard.errors import UsageError
from zeroshard.parallel.sequence_loader import IGNORED

REDUCTIONS = ("mean", "sum")
_LABELS = ("shift_labels", "labels")


def tiled(function: Callable[..., torch.Tensor], x: torch.Tensor, tiles: int) -> torch.Tensor:
    """`function(x)` of a function that sees each token by itself, such as an MLP; x is (..., tokens, width)."""
    return torch.cat(_results(function, [{"x": part} for part in _parts(x, tiles, -2)], named=False), dim=-2)


def tiled_loss(
    function: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    tiles: int,
    reduction: str = "mean",
) -> torch.Tensor:
    """The loss of `function(hidden, labels)`, or of `function(hidden, labels, mask)` where there is a mask.

    The function gets (tokens, width), (tokens,) and (tokens,) of all samples one after the other. With "mean" its loss
    is a mean over the labels of a tile (those that are not -100 and that the mask leaves), and that of the whole is one
    over all of them, wherever they stand.

    Raises:
        UsageError: another reduction, fewer than one tile, or tensors with other numbers of tokens.
    """
    flat = {"hidden": hidden.flatten(0, -2), "labels": labels.flatten()}
    if mask is not None:
        flat["mask"] = mask.flatten()
    columns = _columns(flat, tiles, 0)
    weights = [_count(part["labels"], part.get("mask")) for part in columns]
    return _reduced(_results(function, columns, named=False), weights, reduction)


def tiled_compute(
    function: Callable[..., torch.Tensor],
    tensors: Mapping[str, torch.Tensor | None],
    others: Mapping[str, Any],
    *,
    tiles: int,
    join: int = 1,
    reduction: str = "mean",
) -> torch.Tensor:
    """`function(**tensors, **others)` with `tensors` cut along their second dim.

    Results are joined along dim `join`. Scalars are losses: their sum, or their mean by labels where `tensors` has
    `shift_labels` or `labels`, else by tokens.

    Raises:
        UsageError: as `tiled_loss`.
    """
    cut = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    absent = {name: None for name, tensor in tensors.items() if tensor is None}
    columns = _columns(cut, tiles, 1)
    results = _results(lambda **parts: function(**parts, **absent, **others), columns, named=True)
    if results[0].dim():
        return torch.cat(results, dim=join)
    labels = next((name for name in _LABELS if name in cut), None)
    first = next(iter(cut))
    weights = [_count(part[labels]) if labels else torch.tensor(float(part[first].shape[1])) for part in columns]
    return _reduced(results, weights, reduction)


def _columns(tensors: Mapping[str, torch.Tensor], tiles: int, dim: int) -> list[dict[str, torch.Tensor]]:
    """The parts of each tile by name. Raises UsageError where the tensors differ in their number of tokens."""
    lengths = {name: tensor.shape[dim] for name, tensor in tensors.items()}
    if len(set(lengths.values())) != 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UsageError(f"a sequence in tiles: its tensors differ in their number of tokens ({shown or 'none given'})")
    parts = [_parts(tensor, tiles, dim) for tensor in tensors.values()]
    return [dict(zip(tensors, column, strict=True)) for column in zip(*parts, strict=True)]


def _parts(tensor: torch.Tensor, tiles: int, dim: int) -> list[torch.Tensor]:
    if isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1:
        raise UsageError(f"a sequence in {tiles!r} tiles: a whole number of at least 1 is needed")
    tiles = max(1, min(tiles, tensor.shape[dim]))
    return [part.contiguous() for part in tensor.tensor_split(tiles, dim=dim)]


def _results(
    function: Callable[..., torch.Tensor], columns: Sequence[Mapping[str, torch.Tensor]], *, named: bool
) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    for part in columns:
        arguments, keywords = ((), part) if named else (tuple(part.values()), {})
        results.append(checkpoint(function, *arguments, use_reentrant=False, **keywords))  # pyright: ignore[reportArgumentType]
    return results


def _reduced(losses: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """The sum of losses, or their mean by weight; what has no weight doesn't count, whatever it is."""
    if reduction not in REDUCTIONS:
        raise UsageError(f"output_reduction is {reduction!r}; it is one of {', '.join(REDUCTIONS)}")
    stacked = torch.stack(list(losses))
    if reduction == "sum":
        return stacked.sum()
    share = torch.stack(list(weights)).to(stacked.device, torch.float64)
    counted = torch.where(share > 0, stacked, torch.zeros_like(stacked))
    return (counted * (share / share.sum().clamp(min=1)).to(stacked.dtype)).sum()


def _count(labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Labels that a loss counts."""
    counted = torch.ones_like(labels, dtype=torch.bool) if labels.is_floating_point() else labels != IGNORED
    if mask is not None:
        counted = counted & (mask != 0)
    return counted.sum()

"""Saves parameters that the model divides (tensor parallelism) as whole tensors, in contiguous pieces.

    what two ranks have of two columns of a weight      rank 0   a0 a1 | a2 a3 | a4      rank 1   b0 b1 | b2 b3 | b4
    the whole, row by row                               a0 a1 b0 b1 | a2 a3 b2 b3 | a4 . b4 .
    rank 0 writes                                       a0 a1 b0 b1 |             | a4
    rank 1 writes                                                   | a2 a3 b2 b3 |      b4

Each rank of the axis writes a share of the complete rows, for which the ranks exchange their parts; parts of incomplete
rows are written by the rank that has them. So a checkpoint does not depend on how the model was divided. Rejected: a
piece per row, which are thousands for one weight; gathering whole parameters on one rank, for which all others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from zeroshard.checkpoint.loading import Target
from zeroshard.checkpoint.writer import Piece
from zeroshard.engine.core.handle import Handle
from zeroshard.sharding.cut import Cut, Stripes
from zeroshard.sharding.layout import Segment

Write = Callable[[int, torch.Tensor], None]


def axis_rank(handle: Handle, cut: Cut) -> int:
    """This rank's number along the axis of a cut."""
    return handle.comm.mesh.mesh.position(handle.comm.mesh.rank, (cut.axis,))


def writes_scalars(handle: Handle, segment: Segment) -> bool:
    """Whether this rank, of those with other parts of a parameter, writes what there is once for the parameter."""
    return segment.cut is None or axis_rank(handle, segment.cut) == 0


def whole_pieces(handle: Handle, segment: Segment, piece: Piece) -> Iterator[Piece]:
    """A piece of what this rank has of a parameter, as pieces of the whole; called by all ranks of the cut's axis.

    Args:
        piece: its `info` is the whole tensor's, its range that of this rank's part.
    """
    cut = segment.cut
    if cut is None:
        yield piece
        return
    stripes = cut.stripes(segment.shape, axis_rank(handle, cut))
    first, last = -(-piece.start // stripes.width), piece.stop // stripes.width
    if cut.rows(segment.shape) == 1 or first >= last:
        yield from _by_row(stripes, piece, piece.start, piece.stop)
        return
    yield from _by_row(stripes, piece, piece.start, first * stripes.width)
    yield from _exchanged(handle, cut, stripes, piece, first, last)
    yield from _by_row(stripes, piece, last * stripes.width, piece.stop)


def _by_row(stripes: Stripes, piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """Elements of this rank's part as they are in each row of the whole; at most two rows are touched."""
    while start < stop:
        end = min(stop, (start // stripes.width + 1) * stripes.width)
        begin = stripes.in_whole(start)
        yield replace(
            piece, start=begin, stop=begin + end - start, values=partial(_shifted, piece.values, begin - start)
        )
        start = end


def _shifted(values: Callable[[int, int], torch.Tensor], by: int, low: int, high: int) -> torch.Tensor:
    return values(low - by, high - by)


def _exchanged(handle: Handle, cut: Cut, stripes: Stripes, piece: Piece, first: int, last: int) -> Iterator[Piece]:
    """This rank's share of whole rows [first, last), from what all ranks of the axis have of it."""
    borders = [first + (last - first) * rank // cut.ranks for rank in range(cut.ranks + 1)]
    rows = [end - begin for begin, end in pairwise(borders)]
    own, width, label = rows[stripes.rank], stripes.width, piece.info.name
    data = piece.values(first * width, last * width).detach().to(handle.device).contiguous().view(torch.uint8)
    nbytes = width * piece.info.dtype.itemsize
    out = torch.empty(cut.ranks * own * nbytes, dtype=torch.uint8, device=handle.device)
    over = handle.comm.gathers[(cut.axis,)]
    over.wait(
        over.all_to_all(
            out, data, [own * nbytes] * cut.ranks, [count * nbytes for count in rows], label, (last - first) * nbytes
        )
    )
    whole = out.cpu().view(piece.info.dtype).view(cut.ranks, own, width).transpose(0, 1).reshape(-1)
    begin = borders[stripes.rank] * width * cut.ranks
    if own:
        yield replace(piece, start=begin, stop=begin + whole.numel(), values=partial(_values, whole, begin))


def _values(values: torch.Tensor, begin: int, low: int, high: int) -> torch.Tensor:
    return values[low - begin : high - begin]


def part_target(handle: Handle, segment: Segment, target: Target) -> Target:
    """A target that is a range of this rank's part of a parameter, as one of the whole that takes its part of it."""
    cut = segment.cut
    if cut is None:
        return target
    shape, stripes = cut.whole_shape(target.shape), cut.stripes(segment.shape, axis_rank(handle, cut))
    if target.start >= target.stop:
        return replace(target, shape=shape, start=0, stop=0)
    start, stop = stripes.in_whole(target.start), stripes.in_whole(target.stop - 1) + 1
    return replace(target, shape=shape, start=start, stop=stop, write=partial(_write_part, stripes, target.write))


def _write_part(stripes: Stripes, write: Write, low: int, values: torch.Tensor) -> None:
    """Hand on those of connected elements of the whole that belong to this rank's part: connected there, too."""
    column = torch.arange(low, low + values.numel()) % (stripes.width * stripes.ranks)
    begin = stripes.rank * stripes.width
    taken = values[(column >= begin) & (column < begin + stripes.width)]
    if taken.numel():
        write(stripes.before(low), taken)

"""Tensors put together from pieces and rectangles give every element once, whatever range is asked for."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.checkpoint.foreign.stored import Cast, InMemory, Joined, Piece, Tile, Tiled, chunks
from zeroshard.errors import CheckpointError


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, Tiled]:
    """A tensor and the same cut into a grid of rectangles."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    tiles = [((0,) * len(shape), whole)]
    for dim, size in enumerate(shape):
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        tiles = [
            ((*offsets[:dim], low, *offsets[dim + 1 :]), part.narrow(dim, low, high - low))
            for offsets, part in tiles
            for low, high in itertools.pairwise(cuts)
        ]
    return whole, Tiled(tuple(shape), tuple(Tile(o, InMemory(part)) for o, part in tiles), torch.float32)


@settings(max_examples=60, deadline=None)
@given(cut=cut_tensors(), data=st.data())
def test_any_range_of_rectangles_is_that_of_the_whole(cut: tuple[torch.Tensor, Tiled], data: st.DataObject) -> None:
    whole, tiled = cut
    assert torch.equal(tiled.read(), whole)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    assert torch.equal(tiled.read_flat(start, stop), whole.reshape(-1)[start:stop])


def test_gaps_overlaps_and_strangers_are_refused() -> None:
    one = InMemory(torch.ones(2, 3))
    cases = [
        ((0, 0), (2, 0), (4, 4)),  # a gap at the end of each row
        ((0, 0), (1, 0), (3, 3)),  # one row twice
        ((0, 0), (3, 0), (4, 3)),  # beyond the end
        ((0,), (2,), (4, 3)),  # of another number of dims
    ]
    for first, second, shape in cases:
        with pytest.raises(CheckpointError):
            Tiled(shape, (Tile(first, one), Tile(second, one)), torch.float32)
    with pytest.raises(CheckpointError):
        Tiled((2, 3), (Tile((0, 0), one),), torch.float16)
    with pytest.raises(CheckpointError):
        Joined((7,), (Piece(one, 0, 6),), torch.float32)
    with pytest.raises(CheckpointError):
        Joined((4,), (Piece(one, 3, 4),), torch.float32)


def test_chunks_are_the_elements_in_order() -> None:
    tensor = Cast(InMemory(torch.arange(10.0)), torch.bfloat16)
    parts = list(chunks(tensor, bytes_at_once=6))
    assert [len(part) for part in parts] == [3, 3, 3, 1]
    assert torch.equal(torch.cat(parts), torch.arange(10.0).bfloat16())

"""The flat layout: parameters and shards start on 256-byte borders, and every element has exactly one owner."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.specs import relaxed
from zeroshard.sharding.layout import ALIGNMENT_BYTES, FlatLayout, Segment, flat_layout

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6)
layouts = st.builds(
    lambda found, shards, itemsize: (
        flat_layout([(f"p{index}", shape) for index, shape in enumerate(found)], shards=shards, itemsize=itemsize),
        itemsize,
    ),
    shapes,
    st.integers(1, 5),
    st.sampled_from([1, 2, 4, 8]),
)


def test_the_picture_of_a_small_layout() -> None:
    layout = flat_layout([("w", (3, 30)), ("b", (5,)), ("s", ())], shards=2, itemsize=4)
    assert layout.segments == (Segment("w", (3, 30), 0), Segment("b", (5,), 128), Segment("s", (), 192))
    assert (layout.numel, layout.shard_numel, layout.parameter_numel) == (256, 128, 96)
    assert layout.gaps() == ((90, 128), (133, 192), (193, 256))
    assert [layout.shard_range(rank) for rank in range(2)] == [(0, 128), (128, 256)]
    assert layout.pieces(0, 128) == ((0, 0, 90),)
    assert layout.pieces(128, 256) == ((1, 0, 5), (2, 64, 65))
    assert layout.pieces(40, 130) == ((0, 0, 50), (1, 88, 90))


@pytest.mark.parametrize(("itemsize", "elements"), [(1, 256), (2, 128), (4, 64), (8, 32)])
def test_alignment_is_in_bytes(itemsize: int, elements: int) -> None:
    layout = flat_layout([("a", (1,)), ("b", (1,))], shards=1, itemsize=itemsize)
    assert layout.segments[1].offset == elements


def test_a_parameter_that_fills_its_place_needs_no_padding() -> None:
    assert flat_layout([("a", (64,)), ("b", (64,))], shards=2, itemsize=4).gaps() == ()


def test_nothing_needs_no_memory() -> None:
    layout = flat_layout([], shards=4, itemsize=4)
    assert (layout.numel, layout.shard_numel, layout.gaps(), layout.pieces(0, 0)) == (0, 0, (), ())


def test_only_empty_parameters_need_no_memory() -> None:
    layout = flat_layout([("a", (0, 3)), ("b", (0,))], shards=3, itemsize=4)
    assert (layout.numel, layout.parameter_numel, layout.gaps()) == (0, 0, ())


@relaxed
@given(layouts)
def test_parameters_and_shards_start_on_the_border(made: tuple[FlatLayout, int]) -> None:
    layout, itemsize = made
    assert all(segment.offset * itemsize % ALIGNMENT_BYTES == 0 for segment in layout.segments)
    assert layout.shard_numel * itemsize % ALIGNMENT_BYTES == 0


@relaxed
@given(layouts)
def test_segments_and_gaps_cover_the_buffer_once(made: tuple[FlatLayout, int]) -> None:
    layout, _ = made
    ranges = [(segment.offset, segment.end) for segment in layout.segments if segment.numel] + list(layout.gaps())
    position = 0
    for start, end in sorted(ranges):
        assert start == position < end
        position = end
    assert position == layout.numel


@relaxed
@given(layouts)
def test_padding_is_below_one_border_per_parameter_and_shard(made: tuple[FlatLayout, int]) -> None:
    layout, itemsize = made
    padding = (layout.numel - layout.parameter_numel) * itemsize
    assert padding <= ALIGNMENT_BYTES * (len(layout.segments) + layout.shards)


@relaxed
@given(layouts)
def test_the_shards_are_the_buffer_and_their_pieces_the_segments(made: tuple[FlatLayout, int]) -> None:
    layout, _ = made
    ranges = [layout.shard_range(rank) for rank in range(layout.shards)]
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges)][:-1]
    assert ranges[-1][1] == layout.numel
    owned: dict[int, list[tuple[int, int]]] = {}
    for start, end in ranges:
        for index, low, high in layout.pieces(start, end):
            assert 0 <= low < high <= layout.shard_numel
            owned.setdefault(index, []).append((start + low, start + high))
    for index, segment in enumerate(layout.segments):
        parts = owned.get(index, [])
        assert sum(high - low for low, high in parts) == segment.numel == math.prod(segment.shape)
        if parts:
            assert (parts[0][0], parts[-1][1]) == (segment.offset, segment.end)
            assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))

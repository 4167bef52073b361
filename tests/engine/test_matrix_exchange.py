"""Matrices go to their owners part by part: one part is on its way while another is worked on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import handle_of
from zeroshard.plan.matrices import MATRICES, exchange_nbytes, exchange_parts, part_nbytes
from zeroshard.sharding.layout import FlatLayout, Segment

WIDTH, DEPTH = 8, 16


def _layout(rows: list[int], shards: int) -> FlatLayout:
    """One flat group with matrices of so many rows."""
    segments, offset = [], 0
    for number, each in enumerate(rows):
        segments.append(Segment(str(number), (each, WIDTH), offset))
        offset += each * WIDTH
    return FlatLayout(tuple(segments), -(-offset // shards) * shards, shards)


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_parts_are_runs_of_groups_with_matrices_for_each_rank(shards: int) -> None:
    layouts = [_layout([8, 8, 8], shards) for _ in range(12)]
    parts = exchange_parts(layouts)
    assert [index for part in parts for index in part] == list(range(12))
    assert len(parts) == min(4, 36 // (2 * shards))
    assert all(3 * len(part) >= 2 * shards for part in parts)
    whole = part_nbytes(layouts)
    assert sum(part_nbytes([layouts[index] for index in part]) for part in parts) <= whole + len(parts)


def test_few_matrices_and_none_are_one_part_and_no_part() -> None:
    assert exchange_parts([_layout([8], 4), _layout([8], 4)]) == [range(2)]
    assert exchange_parts([]) == []


def _deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH + index, WIDTH + index + 1) for index in range(DEPTH)))


def _order(rank: int, world: int) -> tuple[list[int], list[int]]:
    """The bytes of the exchange's collectives in the order in which a step issues them, and those of its parts."""
    torch.manual_seed(0)
    model = _deep()
    units = [str(index) for index in range(DEPTH)]
    model, optimizer = zeroshard.shard(model, zeroshard.MuonAdamW(model.named_parameters()), plan=3, units=units)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    issued = [each.nbytes for each in handle_of(model).comm.sent.tail().operations if each.unit == MATRICES]
    (parts,) = exchange_nbytes(zeroshard.plan_of(model)).values()
    zeroshard.close(model)
    return issued, parts


def test_the_next_part_is_sent_before_a_part_is_worked_on_and_each_comes_back_at_once() -> None:
    for issued, parts in run_ranks(2, _order):
        assert len(parts) == 4
        first, second, third, fourth = parts
        assert issued == [first, second, first, third, second, fourth, third, fourth]

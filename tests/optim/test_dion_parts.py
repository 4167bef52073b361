"""The parts of Dion: orthonormal columns without a branch, the rows of a rank's elements, the parts of a pipeline."""

from __future__ import annotations

import math

import pytest
import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.oplog import OperationLog
from zeroshard.optim.dion.blocks import blocks_of, stacks_of
from zeroshard.optim.dion.orthonormal import first_factor, orthonormalize
from zeroshard.optim.dion.pipeline import FactorBuffers, FactorPipeline, Place
from zeroshard.plan.factors import Factors, buffer_nbytes, factor_parts, factor_rank, part_nbytes, spread_matrices
from zeroshard.sharding.layout import FlatLayout, Segment

CPU = torch.device("cpu")


def _with_condition(rows: int, columns: int, condition: float) -> torch.Tensor:
    make = torch.Generator().manual_seed(rows)
    left = torch.linalg.qr(torch.randn(2, rows, columns, dtype=torch.float64, generator=make)).Q
    right = torch.linalg.qr(torch.randn(2, columns, columns, dtype=torch.float64, generator=make)).Q
    return left * torch.logspace(0, -math.log10(condition), columns, dtype=torch.float64) @ right


@pytest.mark.parametrize("shape", [(40, 7), (12, 12), (300, 64), (5, 1)])
@pytest.mark.parametrize("condition", [1.0, 1e5, 1e9])
def test_columns_become_orthonormal_as_those_of_householder(shape: tuple[int, int], condition: float) -> None:
    matrices = _with_condition(*shape, condition)
    found = orthonormalize(matrices)
    error = found.mT @ found - torch.eye(shape[1], dtype=torch.float64)
    assert float(error.abs().max()) < 1e-9
    exact = torch.linalg.qr(matrices).Q
    signs = (exact * found).sum(dim=-2, keepdim=True).sign()
    # Householder's own error of the last columns is the unit of rounding times the condition.
    assert float((found * signs - exact).abs().max()) < 1e-9 + 1e-14 * condition


def test_zeros_stay_zeros_and_dependent_columns_become_any_that_are_orthogonal() -> None:
    zeros = torch.zeros(1, 6, 3, dtype=torch.float64)
    assert not orthonormalize(zeros).any()
    some = _with_condition(6, 3, 10.0)
    some[:, :, 1] = some[:, :, 0] * 2
    some[0, :, 2] = 0
    found = orthonormalize(some)
    gram = found.mT @ found
    assert torch.isfinite(found).all()
    assert not found[0, :, 2].any()
    assert float((gram[0] - torch.diag(torch.tensor([1.0, 1.0, 0.0]).double())).abs().max()) < 1e-9
    assert float((gram[1] - torch.eye(3, dtype=torch.float64)).abs().max()) < 1e-9


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_matrix_that_is_not_finite_becomes_zeros_and_leaves_the_others_of_its_stack(bad: float) -> None:
    some = _with_condition(6, 3, 10.0)
    expected = orthonormalize(some)
    some[0, 1, 1] = bad
    found = orthonormalize(some)
    assert not found[0].any()
    assert torch.equal(found[1], expected[1])


def test_scales_from_the_least_to_the_largest_of_float32_change_nothing() -> None:
    some = _with_condition(9, 4, 100.0)
    expected = orthonormalize(some)
    for scale in (1e-44, 1e38):
        assert float((orthonormalize(some * scale) - expected).abs().max()) < 1e-12


def test_the_first_factor_has_columns_that_are_independent_and_of_norm_one() -> None:
    found = first_factor(16, 64, CPU)
    assert found.dtype == torch.float32
    singular = torch.linalg.svdvals(found.double())
    assert 0.2 < float(singular.min()) <= float(singular.max()) < 2.5
    assert torch.equal(first_factor(4, 64, CPU), found[:4])
    assert float((found.norm(dim=-1) - 1).abs().max()) < 1e-6


@pytest.mark.parametrize(("batch", "rows", "columns"), [(1, 7, 5), (4, 3, 5), (1, 1, 9), (3, 4, 1)])
def test_products_of_the_blocks_of_any_cut_are_those_of_the_whole(batch: int, rows: int, columns: int) -> None:
    sizes = Factors(batch, rows, columns, 1)
    whole = torch.arange(1.0, batch * rows * columns + 1)
    for low in range(len(whole)):
        for high in range(low + 1, len(whole) + 1):
            mine, found = torch.zeros_like(whole), torch.zeros(batch, rows, columns, dtype=torch.float64)
            mine[low:high] = whole[low:high]
            back = torch.zeros(high - low, dtype=torch.float64)
            for block in blocks_of(low, high, sizes):
                padded = block.padded(whole[low:high])
                found[block.matrices, block.rows] += padded
                back[block.low : block.high] += block.own(padded)
            assert torch.equal(found.view(-1), mine.double())
            assert torch.equal(back, whole[low:high].double())


def test_large_matrices_are_divided_into_blocks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.optim.dion.blocks._MOST", 12)
    sizes = Factors(3, 4, 5, 1)
    whole = torch.arange(60.0)
    found = torch.zeros(3, 4, 5, dtype=torch.float64)
    blocks = blocks_of(0, 60, sizes)
    for block in blocks:
        found[block.matrices, block.rows] += block.padded(whole)
    assert torch.equal(found.view(-1), whole.double())
    assert all(block.high - block.low <= 10 for block in blocks)
    small = Factors(6, 2, 2, 1)
    assert [block.high - block.low for block in blocks_of(0, 24, small)] == [12, 12]


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_matrices_on_the_borders_of_ranks_are_spread_and_all_others_lie_on_one(shards: int) -> None:
    segments = (Segment("a", (5, 4), 0), Segment("stack", (6, 3, 4), 20), Segment("b", (1, 9), 100))
    layout = FlatLayout(segments, -(-109 // shards) * shards, shards)
    ranks = (2, 1, 1)
    spread = spread_matrices(layout, ranks)
    assert len(spread) <= shards - 1
    found = {(index, matrix) for index, matrix, _ in spread}
    assert len(found) == len(spread)
    for rank in range(shards):
        start, end = layout.shard_range(rank)
        for index, low, high in layout.pieces(start, end):
            sizes = Factors(*((1, 5, 4), (6, 3, 4), (1, 1, 9))[index], ranks[index])
            offset = layout.segments[index].offset - start
            for first, last in stacks_of(low - offset, high - offset, sizes):
                alone = {(index, matrix) for matrix in range(first, last)}
                assert not alone & found
                found |= alone
    assert found == {(0, 0), *((1, matrix) for matrix in range(6)), (2, 0)}


def test_parts_are_in_order_and_their_buffers_are_those_of_the_largest() -> None:
    sizes = [Factors(1, 8 + index, 16, 4) for index in range(12)]
    parts = factor_parts(sizes)
    assert [index for part in parts for index in part] == list(range(12))
    assert len(parts) >= 4
    largest = max(sum(part_nbytes(sizes[part.start : part.stop])) for part in parts)
    assert buffer_nbytes(sizes) == 4 * largest
    assert factor_parts([]) == []
    assert buffer_nbytes([]) == 0
    assert factor_parts(sizes[:1]) == [range(1)]


class _Recorder:
    """Writes down what is done, and where the buffers are."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.at: dict[int, int] = {}

    def start(self, place: Place, factors: FactorBuffers) -> None:
        assert not any(each.any() for each in (factors.right, factors.left, factors.following))
        self.at[place[0]] = factors.left.data_ptr()
        self._add("start", place, factors)

    def project(self, place: Place, factors: FactorBuffers) -> None:
        self._add("project", place, factors)

    def correct(self, place: Place, factors: FactorBuffers) -> None:
        self._add("correct", place, factors)

    def finish(self, place: Place, factors: FactorBuffers) -> None:
        self._add("finish", place, factors)

    def _add(self, what: str, place: Place, factors: FactorBuffers) -> None:
        """Each step finds what the one before has left in the part's buffers."""
        assert self.at[place[0]] == factors.left.data_ptr()
        assert set(factors.left.view(-1).tolist()) == {float(what != "start") * (place[0] + 1)}
        factors.left.fill_(place[0] + 1)
        self.done.append(f"{what} {place[0]}")


def test_a_region_is_finished_as_soon_as_it_is_wanted_and_buffers_are_used_in_turn() -> None:
    work = _Recorder()
    members = [((number, 0, 0), Factors(1, 8, 16, 4)) for number in range(6)]
    pipeline = FactorPipeline(members, work, Collectives(None, "alone", OperationLog()), CPU)
    assert len(factor_parts([each for _, each in members])) == 6
    for _ in range(2):
        work.done.clear()
        pipeline.begin()
        assert work.done == ["start 0"]
        pipeline.finish(0)
        begun = ["start 0", "start 1", "project 0", "start 2", "project 1", "correct 0"]
        assert work.done == [*begun, "start 3", "project 2", "correct 1", "finish 0"]
        pipeline.finish(0)
        pipeline.finish(5)
        assert len(work.done) == 24
        assert [each for each in work.done if "finish" in each] == [f"finish {number}" for number in range(6)]
        assert len(set(work.at.values())) == 4
        assert (work.at[4], work.at[5]) == (work.at[0], work.at[1])


def test_the_rank_is_a_fraction_of_the_lesser_dim_and_one_at_least() -> None:
    assert factor_rank((8, 100), 0.25) == 2
    assert factor_rank((100, 9), 0.25) == 3
    assert factor_rank((5, 30, 7), 1.0) == 7
    assert factor_rank((4, 2, 2, 2), 0.01) == 1
    assert factor_rank((0, 5), 0.5) == 0

"""Predictions beside what was measured on two H100s (benchmarks/README.md): memory within 3 %, time within 10 %."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.llama import SIZES
from benchmarks.planner_cases import RECIPE, case_of, predict, workload
from tests.planner.settings import BF16
from zeroshard.planner.machine.hardware import GIB, parse_cluster
from zeroshard.planner.predict.cost import kernels_seconds
from zeroshard.planner.predict.measured import MEASURED, Measured
from zeroshard.planner.predict.memory import CUBLAS_WORKSPACE
from zeroshard.planner.predict.rows import Row, Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.model_trace import total_kernels

ENGINE = [row for row in MEASURED if row.stage is not None]
FLOORS = [row for row in MEASURED if row.stage is None]


@cache
def _row(row: Measured) -> Row:
    return predict(case_of(row), row.length, parse_cluster("2xH100-80GB"))


@pytest.mark.parametrize("row", ENGINE, ids=lambda row: row.label)
def test_engine_rows_are_predicted(row: Measured) -> None:
    made = _row(row)
    if row.allocated_gib is not None:
        assert made.memory.peak.total / GIB == pytest.approx(row.allocated_gib, rel=0.03)
    if row.reserved_gib is not None:
        reserved = (made.memory.peak.total + made.slack) / GIB
        assert reserved == pytest.approx(row.reserved_gib, rel=0.03)
    if row.seconds is not None:
        # One of the rows with one sequence is known to have met a busy host (decision 0011).
        noisy = row.samples == 1 and row.tuned
        assert made.time.seconds == pytest.approx(row.seconds, rel=0.25 if noisy else 0.10)


@pytest.mark.parametrize("row", FLOORS, ids=lambda row: row.label)
def test_forward_and_backward_alone_take_what_they_took(row: Measured) -> None:
    work = workload(row.model, row.samples, row.length, row.checkpointing)
    cluster = parse_cluster("1xH100-80GB")
    traced = make_row(work, BF16, Setting(0, Offload.NONE, Checkpointing.OFF), cluster).traced
    assert row.seconds is not None
    if row.samples > 1:  # with one sequence the host decides, not the kernels
        assert kernels_seconds(cluster, total_kernels(traced.segments)) == pytest.approx(row.seconds, rel=0.05)
    if (
        row.allocated_gib is not None and not row.checkpointing
    ):  # beyond it whole gradients add up, which no engine holds
        assert (traced.peak + 2 * work.numel + CUBLAS_WORKSPACE) / GIB == pytest.approx(row.allocated_gib, rel=0.03)


@pytest.mark.parametrize(("card", "seconds"), [("H100-80GB", 0.1165), ("H200-141GB", 0.1129)])
def test_an_engine_with_compiled_blocks_is_estimated_from_what_compiling_saves_without_one(
    card: str, seconds: float
) -> None:
    """Stage 3, 1.1e9 parameters, two GPUs: 19.50 GiB on either card (benchmarks/README.md)."""
    cluster = parse_cluster(f"2x{card}")
    setting = Setting(3, Offload.NONE, Checkpointing.OFF)
    made = make_row(workload("1b", 4, 2048, False), RECIPE, setting, cluster, compiling=True)
    assert made.time.seconds == pytest.approx(seconds, rel=0.10)
    assert made.memory.peak.total / GIB == pytest.approx(19.50, rel=0.03)


@pytest.mark.parametrize("row", [row for row in ENGINE if row.commit == "1c03287"], ids=lambda row: row.label)
def test_nothing_that_was_measured_is_unexplained(row: Measured) -> None:
    """That commit's `Init` kept a buffer as large as the largest parameter in float32; all else is in the plan."""
    assert row.allocated_gib is not None
    shape = SIZES[row.model]
    kept = 4 * shape.vocabulary * shape.dim
    assert (_row(row).memory.peak.total + kept) / GIB == pytest.approx(row.allocated_gib, abs=0.01)


def test_the_table_knows_where_its_numbers_come_from() -> None:
    assert len(MEASURED) >= 6
    assert all(row.commit and row.where for row in MEASURED)

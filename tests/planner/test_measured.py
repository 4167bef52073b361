"""Predictions beside what was measured on two H100s (benchmarks/README.md): memory within 3 %, time within 10 %."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.planner.settings import BF16, benchmark_source
from zeroshard.planner.checkpointing import Checkpointing
from zeroshard.planner.cost import kernels_seconds
from zeroshard.planner.hardware import GIB, parse_cluster
from zeroshard.planner.measured import MEASURED, Measured
from zeroshard.planner.memory import CUBLAS_WORKSPACE
from zeroshard.planner.rows import Setting, make_row
from zeroshard.planner.tiers import Offload
from zeroshard.planner.trace import total_kernels
from zeroshard.planner.workload import Workload

ENGINE = [row for row in MEASURED if row.stage is not None]
FLOORS = [row for row in MEASURED if row.stage is None]


@cache
def _work(model: str, checkpointing: bool, samples: int, length: int) -> Workload:
    return Workload(benchmark_source(model, checkpointing=checkpointing), samples, length)


def _workload(row: Measured) -> Workload:
    return _work(row.model, row.checkpointing, row.samples, row.length)


@pytest.mark.parametrize("row", ENGINE, ids=lambda row: row.label)
def test_engine_rows_are_predicted(row: Measured) -> None:
    assert row.stage is not None
    setting = Setting(row.stage, Offload.NONE, Checkpointing.OFF)
    recipe = replace(BF16, policy=replace(BF16.policy, spare_nbytes=2**60 if row.tuned else 0))
    made = make_row(_workload(row), recipe, setting, parse_cluster("2xH100-80GB"))
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
    work = _workload(row)
    cluster = parse_cluster("1xH100-80GB")
    traced = make_row(work, BF16, Setting(0, Offload.NONE, Checkpointing.OFF), cluster).traced
    assert row.seconds is not None
    if row.samples > 1:  # with one sequence the host decides, not the kernels
        assert kernels_seconds(cluster, total_kernels(traced.segments)) == pytest.approx(row.seconds, rel=0.05)
    if (
        row.allocated_gib is not None and not row.checkpointing
    ):  # beyond it whole gradients add up, which no engine holds
        assert (traced.peak + 2 * work.numel + CUBLAS_WORKSPACE) / GIB == pytest.approx(row.allocated_gib, rel=0.03)


def test_the_table_knows_where_its_numbers_come_from() -> None:
    assert len(MEASURED) >= 6
    assert all(row.commit and row.where for row in MEASURED)

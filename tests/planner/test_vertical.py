"""The planner counts steps whose micro-batches pass a unit together: traffic of one, activations of all, less time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.planner.settings import BF16
from zeroshard.planner.machine.hardware import parse_cluster
from zeroshard.planner.predict.links import link_traffic
from zeroshard.planner.predict.rows import Row, Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.sources import sized_source
from zeroshard.planner.trace.workload import Workload

MICRO = 4
USUAL = replace(BF16, policy=replace(BF16.policy, reuse=False))
TOGETHER = replace(USUAL, policy=replace(USUAL.policy, micro_batches=2))
"""For some number of micro-batches: that of the row counts."""


@cache
def _work(samples: int) -> Workload:
    return Workload(sized_source(3e8, 4, 1024), samples, 512)


def _row(together: bool, *, micro: int = MICRO, samples: int = 1, full: bool = False, nvme: bool = False) -> Row:
    offload = Offload.NVME_PARAM if nvme else Offload.CPU_PARAM
    setting = Setting(3, offload, Checkpointing.ON if full else Checkpointing.OFF)
    recipe = TOGETHER if together else USUAL
    return make_row(_work(samples), recipe, setting, parse_cluster("2xH100-80GB"), micro_batches=micro)


def test_parameters_pass_the_links_once_for_all_micro_batches() -> None:
    usual, together, alone = _row(False), _row(True), _row(False, micro=1)
    assert together.plan.policy.micro_batches == MICRO
    assert together.traffic() == alone.traffic()
    assert sum(usual.traffic().values()) > 2 * sum(together.traffic().values())
    assert link_traffic(together) == link_traffic(alone)
    # Beside parameters for gathers the state passes the link, and with accumulators no gradients do.
    assert link_traffic(usual)["PCIe"] > link_traffic(together)["PCIe"]


def test_a_step_takes_less_time_and_no_accumulators() -> None:
    usual, together = _row(False, nvme=True), _row(True, nvme=True)
    assert usual.time.busy["disk"] == pytest.approx(MICRO * together.time.busy["disk"])
    saved = usual.time.busy["disk"] - together.time.busy["disk"]
    assert usual.time.seconds - together.time.seconds == pytest.approx(saved, rel=0.1), "the disk bounds both steps"
    kernels = ("gemm", "attention", "elementwise")
    for kind in kernels:
        spent = usual.time.compute.get(kind, 0.0)
        assert together.time.compute.get(kind, 0.0) == pytest.approx(spent), "the same arithmetic"
    gradients = [row.memory.tiers.device.get("gradients", 0) for row in (usual, together)]
    assert gradients[1] == 0 < gradients[0]


@pytest.mark.parametrize("full", [False, True])
def test_activations_are_those_of_all_micro_batches_in_one(full: bool) -> None:
    together, large = _row(True, full=full), _row(False, micro=1, samples=MICRO, full=full)

    def waiting(row: Row) -> int:
        return max(moment.nbytes.get("activations", 0) for moment in row.memory.moments)

    # Only one micro-batch at a time has what a block needs while it computes.
    assert waiting(together) <= 1.01 * waiting(large)
    assert waiting(together) > (waiting(_row(False, micro=1, full=True)) if full else 0.8 * waiting(large))

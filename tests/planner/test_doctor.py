"""What can be measured without a GPU is measured, saved, and read back by the planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.planner_cases import workload
from tests.planner.settings import BF16
from tests.support.cases import only_with_all_cases
from tests.support.disk import disk_folder
from tests.support.distributed import run_ranks
from zeroshard.errors import PlanError, UsageError
from zeroshard.launch.cli import app
from zeroshard.planner.machine.calibration import Calibration, calibrated, load_calibration
from zeroshard.planner.machine.doctor import disk_rates
from zeroshard.planner.machine.fabric import fit, gather_seconds
from zeroshard.planner.machine.hardware import parse_cluster
from zeroshard.planner.machine.host_speed import LAYERS, launch_seconds, launches
from zeroshard.planner.predict.rows import Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing


def test_the_machine_is_measured_and_the_planner_uses_it(tmp_path: Path) -> None:
    saved = tmp_path / "calibration.json"
    args = ["doctor", "--save", str(saved), "--folder", str(tmp_path), "--disk-mib", "16"]
    shown = CliRunner().invoke(app, args, catch_exceptions=False)
    assert "host memory" in shown.output
    assert "disk" in shown.output
    found = load_calibration(saved)
    assert found.efficiency["host_memory_rate"] > 1e8
    assert not list(tmp_path.glob(".zeroshard-doctor-*"))
    cluster = parse_cluster("8xA100")
    if not found.gpu:
        assert calibrated(cluster, found).efficiency.disk_rate == found.efficiency["disk_rate"]
        assert calibrated(cluster, found).efficiency.products == cluster.efficiency.products


def test_a_folder_for_state_on_disk_is_measured_beside_plain_direct_input_and_output(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        saved = tmp_path / "calibration.json"
        args = ["doctor", "--save", str(saved), "--nvme", str(folder), "--nvme-mib", "144"]
        shown = CliRunner().invoke(app, args, catch_exceptions=False).output
        for told in (
            "state on disk",
            f"in {folder}",
            "plain direct I/O",
            "of that are reached",
            "s for Adam's state of",
            "parameters there too",
        ):
            assert told in shown.replace("\n", " ")
        assert load_calibration(saved).efficiency["disk_rate"] > 1e6
        assert sorted(path.name for path in folder.iterdir()) == ["calibration.json"]
    refused = CliRunner().invoke(app, ["doctor", "--nvme", str(tmp_path / "none")])
    assert isinstance(refused.exception, PlanError) or "does not exist" in refused.output


def test_the_hosts_speed_is_seconds_over_the_planners_own_count() -> None:
    per_block = (launches() - 3) / LAYERS  # the loss and its backward beside
    assert 15 < per_block < 60
    assert 1e-7 < launch_seconds(torch.device("cpu")) < 1


def test_a_host_twice_as_slow_makes_a_step_longer_that_it_bounds() -> None:
    cluster = parse_cluster("2xH100")
    slow = calibrated(cluster, Calibration("", "", {"host_launch": 74e-6, "host_operation": 0.76e-3}, {}))
    work = workload("tiny", 1, 64, False)
    fast, late = (make_row(work, BF16, Setting(3, Offload.NONE, Checkpointing.OFF), c) for c in (cluster, slow))
    assert late.time.seconds > 1.6 * fast.time.seconds


def test_a_calibration_of_another_card_is_refused() -> None:
    with pytest.raises(PlanError, match="L40S"):
        calibrated(parse_cluster("8xA100"), Calibration("", "L40S-48GB", {"products": 0.5}, {}))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("nothing", "not JSON"),
        ("{}", "efficiency"),
        (json.dumps({"efficiency": {"product": 0.5}}), "products"),
        (json.dumps({"efficiency": {"products": -1}}), "above 0"),
    ],
)
def test_a_calibration_that_makes_no_sense_is_refused(content: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(PlanError, match=expected):
        load_calibration(path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        disk_rates(tmp_path / "nowhere", 1)


def test_latency_and_rate_come_out_of_the_times() -> None:
    sizes = (1, 8, 32, 128, 512)
    seconds = [45e-6 + size * 2**20 / 2 / 263e9 for size in sizes]
    fabric = fit(sizes, seconds, 2)
    assert fabric.latency == pytest.approx(45e-6, rel=0.01)
    assert fabric.rate == pytest.approx(263e9, rel=0.01)


def _seconds(rank: int, world_size: int) -> float:
    return gather_seconds(2**16, world_size, torch.device("cpu"))


@only_with_all_cases
def test_collectives_are_measured_by_all_ranks() -> None:
    assert all(0 < seconds < 60 for seconds in run_ranks(2, _seconds))

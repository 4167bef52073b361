"""The benchmark of three tiers takes its steps with state in all of them, and puts what it measured beside the plan."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import largest, tiers
from benchmarks.grow import grow
from benchmarks.llama import SIZES
from benchmarks.ranks import ROOT
from benchmarks.setting import Setting, Trainer
from tests.support.beside import needs_torchao
from tests.support.cases import only_with_all_cases
from tests.support.disk import disk_folder
from tests.support.distributed import run_ranks
from zeroshard.planner.machine.hardware import GIB, parse_cluster

WITH_TORCHAO = (
    "import sys; from tests.support.beside import use_beside; use_beside(); "
    "from benchmarks.tiers import main; raise SystemExit(main())"
)
STEP = largest.Step(1, 128)
SMALL = ["--size", "tiny", "--length", "16", "--batch", "1", "--share", "0.75", "--kept-share", "0.25"]


def test_state_in_three_places_is_measured_beside_the_plan(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        out = tmp_path / "row.json"
        command = ["--path", str(folder), *SMALL, "--probe-gib", "0.15", "--steps", "2", "--json", str(out)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.tiers", *command], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    row = json.loads(out.read_text())
    plan = row["planned"]
    assert row["parameters"] == SIZES["tiny"].numel
    assert 0 < plan["share_on_host"] <= 0.25
    assert 0.5 <= plan["share_on_disk"] < 1 - plan["share_on_host"], "the rest is on the device"
    assert (len(row["warm_up_s"]), len(row["timed_s"]), len(row["disk_rates"])) == (2, 2, 2)
    floor = max(row["compute_floor_s"], row["disk_floor_s"])
    assert math.isclose(row["ratio"], row["step_s"] / floor)
    assert plan["bounds"]["disk"] == pytest.approx(row["disk_floor_s"], abs=1e-4), "at the measured rate"
    assert plan["disk_gib"] == pytest.approx(row["state_disk_gib"], abs=2e-3)
    assert row["disk_gib"] == pytest.approx(row["state_disk_gib"], rel=0.2, abs=0.02)
    assert row["host_gib"] > row["host_before_gib"]
    assert f"| s/step | {plan['step_s']:.2f} | {row['step_s']:.2f} |" in done.stdout


@needs_torchao
def test_moments_in_8_bits_are_measured_too(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        out = tmp_path / "row.json"
        command = [
            "--path",
            str(folder),
            *SMALL,
            "--probe-gib",
            "0.15",
            "--steps",
            "1",
            "--bits",
            "8",
            "--json",
            str(out),
        ]
        done = subprocess.run([sys.executable, "-c", WITH_TORCHAO, *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    row = json.loads(out.read_text())
    assert row["planned"]["update"] == "streamed"
    assert row["planned"]["disk_gib"] == pytest.approx(row["state_disk_gib"], abs=2e-3)
    assert 0.5 <= row["planned"]["share_on_disk"] < 1


def _budgets(rank: int, world: int) -> None:
    args = tiers.parse(SMALL)
    setting = Setting("zeroshard3", torch.device("cpu"), size="tiny", batch=1, length=8)
    trainer = Trainer(lambda _: torch.ones(()), 1)
    found = tiers.take_steps(trainer, setting, args, tiers.Clock(tiers.CLOSING_SECONDS / 2))
    assert (len(found.before), len(found.timed)) == (1, 1), "two steps are taken in any case"
    found = tiers.take_steps(trainer, setting, args, tiers.Clock(600))
    assert (len(found.before), len(found.timed)) == (args.warmup, args.steps)


def test_the_budget_ends_the_steps_early() -> None:
    run_ranks(1, _budgets)


def test_memory_that_is_filled_once_is_given_back() -> None:
    assert grow(32 << 20, 120)


def test_a_disk_takes_what_the_device_and_the_host_have_no_room_for() -> None:
    cluster, works, shape = parse_cluster("1xH200"), {}, replace(SIZES["1b"], layers=8)

    def fit(device: int, host: int, disk: int) -> largest.Fit | None:
        return largest.fit(shape, "nvme", cluster, STEP, largest.Limits(device, host, disk), works)

    device = largest.row(shape, "nvme", 0.6, cluster, STEP, works).total
    less, more = fit(device, GIB, 100 * GIB), fit(device, 3 * GIB, 100 * GIB)
    assert less is not None
    assert more is not None
    assert less.share == more.share <= 0.6, "the device alone decides what leaves it"
    assert less.on_host < more.on_host
    assert less.row.disk > more.row.disk
    assert less.row.host <= GIB < more.row.host <= 3 * GIB
    assert fit(device, 3 * GIB, more.row.disk) is not None
    assert fit(device, 3 * GIB, more.row.disk - 1) is None
    assert fit(2 * GIB, 3 * GIB, 100 * GIB) is None


@only_with_all_cases
def test_the_size_for_a_gpu_with_a_disk_is_what_the_plan_says_and_one_layer_more_does_not_fit() -> None:
    keep = ["--keep-host", "6", "--keep-device", "2"]
    args = largest.parse(["--cluster", "1xH200", "--disk-gib", "60", *keep])
    cluster = parse_cluster(args.cluster)
    found = largest.largest(
        SIZES["13b"], "nvme", cluster, largest.Step(args.batch, args.length), largest.limits(args, cluster)
    )
    assert found is not None
    assert found.layers == SIZES["20b"].layers
    found = largest.fit(
        SIZES["30b"],
        "nvme",
        cluster,
        largest.Step(args.batch, args.length, 8),
        largest.limits(args, cluster),
        {},
    )
    assert found is not None


def test_the_disk_works_beside_the_processor_in_a_predicted_step() -> None:
    cluster, works = parse_cluster("1xH200", disk_gbs=4.0), {}
    time = largest.row(SIZES["1b"], "nvme", 0.9, cluster, STEP, works, on_host=0.5).time
    by_processor, on_disk = (
        [span for span in time.spans if span.stream == stream and span.label.startswith("update")]
        for stream in ("cpu", "windows")
    )
    assert by_processor
    assert on_disk
    assert min(span.start for span in on_disk) == min(span.start for span in by_processor)
    alone = largest.row(SIZES["1b"], "nvme", 0.4, cluster, STEP, works).time
    assert time.seconds < alone.seconds + time.busy["cpu"] / 2

"""The benchmark measures what it says, on two gloo ranks and a tiny model: figures are another matter, and a GPU's."""

from __future__ import annotations

import math
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from rich.console import Console

from benchmarks import compare, largest, losses, train
from benchmarks.engines import ENGINES, build
from benchmarks.llama import SIZES, Llama
from benchmarks.ranks import ROOT
from benchmarks.ranks import run_ranks as launch
from benchmarks.report import Outcome, add_ratios
from benchmarks.setting import NotInstalled, Setting
from tests.support.cases import only_with_all_cases
from tests.support.distributed import run_ranks
from zeroshard.planner.machine.hardware import parse_cluster

SMALL = ["--size", "tiny", "--length", "16", "--batch", "1", "--steps", "1", "--warmup", "1", "--repetitions", "1"]
CPU = torch.device("cpu")


@only_with_all_cases
def test_compare_measures_floor_and_zeroshard_and_puts_one_beside_the_other() -> None:
    args = compare.parse(["--run", "floor", "--run", "zeroshard3", "--nproc", "2", "--commit", "abc", *SMALL])
    outcomes = compare.run(compare.requests_of(args), args, Console(quiet=True))
    add_ratios(outcomes, compare.SETTING)
    floor, ours = (outcome.row for outcome in outcomes)
    assert floor is not None, outcomes[0].log
    assert ours is not None, outcomes[1].log
    assert floor["ratio"] == 1.0
    assert math.isclose(ours["ratio"], ours["step_s"] / floor["step_s"], abs_tol=1e-3)
    assert ours["world"] == 2
    assert ours["params"] == SIZES["tiny"].numel
    # Random tokens: about the logarithm of the vocabulary.
    assert math.isclose(ours["loss"], math.log(SIZES["tiny"].vocabulary), rel_tol=0.1)
    assert ours["mfu"] is ours["allocated_gib"] is ours["reserved_gib"] is None
    text = compare.markdown(outcomes, compare.provenance(args, outcomes, "compare"))
    assert "| zeroshard3 | tiny, 1 x 16, eager |" in text
    assert "Commit abc, 2 x cpu" in text


def _losses(rank: int, world_size: int, engines: tuple[tuple[str, bool], ...]) -> list[list[float]]:
    found = []
    for engine, tuned in engines:
        trainer = build(Setting(engine, CPU, size="tiny", batch=1, accumulation=2, tuned=tuned, exact=True, rate=1e-3))
        text = losses.Text(1, 16, CPU)
        found.append([float(trainer.step([text.take(), text.take()])) for _ in range(3)])
        trainer.close()
    return found


@only_with_all_cases
def test_engines_start_from_the_same_weights_and_train_alike() -> None:
    engines = (("ddp", False), ("fsdp2", True), ("zeroshard3", False), ("initialize3", False))
    reference, *others = run_ranks(2, _losses, engines)[0]
    assert reference[-1] < reference[0]
    for (engine, tuned), curve in zip(engines[1:], others, strict=True):
        for step, (ours, theirs) in enumerate(zip(curve, reference, strict=True)):
            assert math.isclose(ours, theirs, abs_tol=0.03), f"{engine} tuned={tuned} step {step}"


def test_a_meta_model_has_as_many_parameters_as_its_shape_says() -> None:
    for shape in SIZES.values():
        with torch.device("meta"):
            model = Llama(shape)
        assert sum(parameter.numel() for parameter in model.parameters()) == shape.numel
    assert round(SIZES["1b"].numel / 1e9, 2) == 1.10
    assert round(SIZES["7b"].numel / 1e9, 2) == 6.74


def test_every_row_of_every_preset_is_a_measurement() -> None:
    for name, rows in compare.PRESETS.items():
        assert rows[0].startswith("floor")
        assert len(set(rows)) == len(rows), name
        for row in rows:
            words, ranks = compare.row_ranks(row, 2)
            assert ranks in (1, 2)
            assert train.parse(["--engine", *words]).engine in ENGINES


@only_with_all_cases
def test_the_largest_size_is_what_the_plan_says_and_one_layer_more_does_not_fit() -> None:
    args = largest.parse(["--offload", "streamed"])
    cluster = parse_cluster(args.cluster)
    found = largest.largest(
        SIZES["13b"], "streamed", cluster, largest.Step(args.batch, args.length), largest.limits(args, cluster)
    )
    assert found is not None
    assert (found.layers, found.share) == (SIZES["14b"].layers, compare.LARGEST_SHARE)


def test_options_after_a_preset_apply_to_its_rows_and_only_keeps_the_floors() -> None:
    args = compare.parse(["--preset", "quick-1b", "--only", "zeroshard3", "--length", "64"])
    eager = ["floor", "zeroshard3", "zeroshard3 --graph"]
    compiled = ["floor --compile", "zeroshard3 --compile", "zeroshard3 --graph --compile"]
    assert compare.requests_of(args) == [*eager, *compiled]
    assert args.options == ["--length", "64"]


def test_a_floor_is_measured_again_behind_its_rows_and_the_ratio_is_to_the_mean() -> None:
    rows = [
        "--run",
        "floor",
        "--run",
        "floor --graph",
        "--run",
        "zeroshard3",
        "--run",
        "floor --compile",
        "--run",
        "ddp",
    ]
    again = compare.requests_of(compare.parse([*rows, "--floor-again"]))
    assert again == ["floor", "floor --graph", "zeroshard3", "floor", "floor --compile", "ddp", "floor --compile"]
    setting = dict.fromkeys(compare.SETTING, 0)
    times = [("floor", 1.0), ("zeroshard3", 1.21), ("floor", 1.2)]
    outcomes = [Outcome(name, {**setting, "engine": name, "graph": False, "step_s": step}) for name, step in times]
    add_ratios(outcomes, compare.SETTING)
    assert [outcome.row["ratio"] for outcome in outcomes if outcome.row] == [0.909, 1.1, 1.091]


def test_a_missing_engine_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(NotInstalled, match="deepspeed is not installed"):
        build(Setting("deepspeed3", CPU, size="tiny"))


def test_zeroshards_package_is_not_measured_under_the_name_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ModuleType("deepspeed")
    monkeypatch.setattr(ours, "__version__", "0.19.6+zeroshard", raising=False)
    monkeypatch.setitem(sys.modules, "deepspeed", ours)
    with pytest.raises(NotInstalled, match="only zeroshard's own"):
        build(Setting("deepspeed3", CPU, size="tiny"))


def test_the_floor_as_a_graph_can_be_tried_without_a_gpu() -> None:
    ids = torch.zeros(1, 16, dtype=torch.int64)
    trainer = build(Setting("floor", CPU, size="tiny", batch=1, length=16, graph=True))
    assert math.isfinite(trainer.step([(ids, ids)]).item())


def test_the_package_lists_its_benchmarks_and_refuses_what_is_none() -> None:
    command = [sys.executable, "-m", "benchmarks"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py") if "__main__" in path.read_text()}
    assert scripts == {line.split()[0] for line in listed.stdout.splitlines() if line.startswith("  ")}
    assert subprocess.run([*command, "speed"], cwd=ROOT, capture_output=True).returncode == 2


def test_rows_without_time_left_are_left_out_and_said_so() -> None:
    args = compare.parse(["--run", "floor", "--nproc", "2", "--budget", "1"])
    (outcome,) = compare.run(["floor"], args, Console(quiet=True))
    assert outcome.row is None
    assert outcome.error == "left out: no time left in the budget"


def test_ranks_end_when_time_is_up_and_when_one_fails() -> None:
    slow = launch("timeit", ["-n1", "-r1", "import time; time.sleep(60)"], nproc=2, timeout=1)
    assert slow.error == "out of time"
    one = "import os, time; os._exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
    failed = launch("timeit", ["-n1", "-r1", one], nproc=2, timeout=60)
    assert failed.error == "rank 1 ended with code 3"
    assert max(slow.seconds, failed.seconds) < 30

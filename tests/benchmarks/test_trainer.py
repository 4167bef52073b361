"""The table of Trainer: which `deepspeed` a row meets, what a row says, and that a run measures what it says."""

from __future__ import annotations

import importlib.util
import math
import os
from importlib.metadata import distributions
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import trainer
from benchmarks.compare import run
from benchmarks.llama import SIZES
from benchmarks.report import Outcome


def _path(environment: dict[str, str]) -> list[str]:
    return environment["PYTHONPATH"].split(os.pathsep)


def test_each_row_finds_the_deepspeed_that_it_is_about(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    of = trainer.environments(tmp_path / "metadata", tmp_path / "real")
    ours = _path(dict(of("zeroshard")))
    assert Path(ours[0], "deepspeed", "__init__.py").is_file()
    assert ["zeroshard" in found.version for found in distributions(name="deepspeed", path=ours[:2])] == [True]
    assert _path(dict(of("deepspeed")))[0] == str(tmp_path / "real")
    assert str(tmp_path) not in os.pathsep.join(_path(dict(of("fsdp2"))))


def test_a_row_that_failed_says_why() -> None:
    made = trainer.cells(Outcome("deepspeed --tuned", error="deepspeed is not installed"))
    assert made[:3] == ["deepspeed", "--tuned", "deepspeed is not installed"]
    assert len(made) == len(trainer.COLUMNS)


@pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_trainer_is_timed_on_zeroshard_and_fsdp2_is_not_mistaken_for_ddp(tmp_path: Path) -> None:
    small = ["--size", "tiny", "--length", "16", "--batch", "1", "--steps", "1", "--warmup", "1", "--repetitions", "2"]
    args = trainer.parse(["--rows", "zeroshard", "fsdp2", "--nproc", "2", "--commit", "abc", *small])
    (tmp_path / "metadata").mkdir()
    environment = trainer.environments(tmp_path / "metadata", None)
    quiet = Console(quiet=True)
    ours, other = run(args.rows, args, quiet, module="benchmarks.trainer_row", environment=environment)
    assert ours.row is not None, ours.log
    assert ours.row["world"] == 2
    assert len(ours.row["step_s_all"]) == 2
    assert math.isclose(ours.row["loss"], math.log(SIZES["tiny"].vocabulary), rel_tol=0.1)
    assert other.error == "accelerate shards by FSDP2 on GPUs only, and would take DDP here"

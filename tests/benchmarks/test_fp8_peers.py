"""fp8 beside its peers: what a row says, and on two gloo ranks that losses fall and bytes on the wire are halved."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import fp8_peers
from benchmarks.compare import run
from benchmarks.report import Outcome
from tests.support.beside import needs_torchao
from tests.support.cases import only_with_all_cases
from zeroshard.fp8.recipe import Scaling

SMALL = ["--size", "tiny", "--length", "32", "--batch", "1", "--steps", "3", "--warmup", "1", "--repetitions", "2"]

WEIGHTS = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024
"""Of the linear layers of a block, of which there are four."""


def _measured(rows: list[str]) -> list[Outcome]:
    args = fp8_peers.parse(["--rows", *rows, "--nproc", "2", "--eager", "--fp8-layers", "blocks", *SMALL])
    found = run(args.rows, args, Console(quiet=True))
    fp8_peers.add_ratios(found)
    for outcome in found:
        assert outcome.row is not None, outcome.log
        assert outcome.row["loss"] < outcome.row["first_loss"] < 8.0
    return found


def _same_but_for_blocks(in_bf16: Outcome, in_fp8: Outcome, gathers: int) -> None:
    """So many gathers of blocks move a byte a weight less; everything else travels as before."""
    assert in_bf16.row is not None
    assert in_fp8.row is not None
    saved = in_bf16.row["gathered_mib"] - in_fp8.row["gathered_mib"]
    assert saved == pytest.approx(gathers * WEIGHTS / 2**20, rel=0.01)
    assert in_fp8.row["reduced_mib"] == pytest.approx(in_bf16.row["reduced_mib"], abs=0.05)
    assert in_fp8.row["loss"] == pytest.approx(in_bf16.row["loss"], abs=0.05)


def test_a_row_in_fp8_gathers_a_byte_a_weight_and_its_loss_falls_as_in_bf16() -> None:
    _same_but_for_blocks(*_measured(["zeroshard3", "zeroshard3 --fp8 blockwise"]), gathers=7)  # one block stays


@only_with_all_cases
@needs_torchao
def test_torchao_on_fsdp2_and_all_recipes_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Path(sys.prefix) / "beside"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(beside)])))
    found = _measured(list(fp8_peers.ROWS))
    _same_but_for_blocks(found[0], found[1], gathers=8)
    losses = [outcome.row["loss"] for outcome in found if outcome.row is not None]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=0.05)


def test_rows_say_how_fast_they_are_beside_bf16_and_which_loss_did_not_fall() -> None:
    same = {"tuned": False, "tokens_s": 1, "allocated_gib": None, "gathered_mib": 1.0, "reduced_mib": 1.0, "size": "1b"}
    outcomes = [
        Outcome("fsdp2", {**same, "engine": "fsdp2", "fp8": "none", "step_s": 0.12, "first_loss": 9.0, "loss": 3.0}),
        Outcome("ours", {**same, "engine": "zeroshard3", "fp8": "none", "step_s": 0.1, "first_loss": 9.0, "loss": 3.0}),
        Outcome("fp8", {**same, "engine": "zeroshard3", "fp8": "rowwise", "step_s": 0.08, "first_loss": 9, "loss": 10}),
        Outcome("fsdp2 --fp8 tensorwise", error="torchao is not installed"),
    ]
    fp8_peers.add_ratios(outcomes)
    assert [fp8_peers.cells(outcome)[1:5] for outcome in outcomes[:3]] == [
        ["bf16", "120.00", "1.000", "1.000"],
        ["bf16", "100.00", "1.200", "1.000"],
        ["rowwise", "80.00", "1.500", "1.250"],
    ]
    assert fp8_peers.cells(outcomes[3])[:3] == ["fsdp2", "--fp8 tensorwise", "torchao is not installed"]
    assert fp8_peers.risen(outcomes) == ["fp8"]


def test_the_rows_have_every_recipe_of_zeroshard() -> None:
    assert {row.split()[-1] for row in fp8_peers.ROWS if row.startswith("zeroshard3 ")} == {
        one.value for one in Scaling
    }

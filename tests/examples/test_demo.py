"""The demo from end to end on a few steps, and what it says when it can't start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for package in ("tokenizers", "transformers", "matplotlib"):
    pytest.importorskip(package)


def demo(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def test_text_that_is_missing_ends_in_one_line(tmp_path: Path) -> None:
    result = demo("--text", "nowhere.txt", folder=tmp_path)
    assert result.returncode == 1
    assert result.stderr == "demo: no such text file: nowhere.txt\n"


def test_a_folder_that_no_demo_made_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    result = demo("--out", "mine", folder=tmp_path)
    assert result.returncode == 1
    assert "holds something that no demo made" in result.stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("option", [("--steps", "1"), ("--nproc", "0"), ("--stage", "4"), ("--vocabulary", "5")])
def test_an_option_out_of_range_is_named(option: tuple[str, str], tmp_path: Path) -> None:
    result = demo(*option, folder=tmp_path)
    assert result.returncode == 2
    assert option[0] in result.stderr.splitlines()[-1]


def test_the_demo_trains_stops_resumes_exports_and_writes(tmp_path: Path) -> None:
    result = demo("--steps", "6", "--vocabulary", "512", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    out = tmp_path / "runs" / "demo"

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert list(losses) == [1, 2, 3, 4, 5, 6], "each step once, over the stop at 3"
    assert losses[6] < losses[1]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "a new launch resumes at step 3" in result.stdout

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(out / "export", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(out / "export").vocab_size == model.config.vocab_size == 512

    # The stop changes nothing: a straight run of the same script has the same losses to the last bit.
    straight = demo("--steps", "6", "--vocabulary", "512", "--no-stop", "--out", "straight", folder=tmp_path)
    assert straight.returncode == 0, straight.stderr
    rows = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"]: row["loss"] for row in rows if "loss" in row} == losses

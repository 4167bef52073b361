"""The demo from end to end on a few steps, and what it says when it can't start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import ALL_CASES
from tests.support.distributed import run_ranks
from tests.support.installed import need

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
need("tokenizers", "transformers", "matplotlib")


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(EXAMPLES)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def demo(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "demo.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=500)


def losses_of(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def refused(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    """The exit code of the demo that can't start; in this process, as an import of torch is the cost of a new one."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    from demo import main

    try:
        return main()
    except SystemExit as end:
        return int(end.code or 0)


def test_text_that_is_missing_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, tmp_path, "--text", "nowhere.txt") == 1
    assert capsys.readouterr().err == "demo: no such text file: nowhere.txt\n"


def test_a_folder_that_no_demo_made_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert refused(monkeypatch, tmp_path, "--out", "mine") == 1
    assert "holds something that no demo made" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("option", [("--steps", "1"), ("--nproc", "0"), ("--stage", "4"), ("--vocabulary", "5")])
def test_an_option_out_of_range_is_named(
    option: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, tmp_path, *option) == 2
    assert option[0] in capsys.readouterr().err.splitlines()[-1]


def _train_straight(rank: int, world_size: int, folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["gpt.py", "--out", "straight", "--steps", "6"]
    from gpt import main

    main()


@pytest.mark.timeout(600)  # five processes that load torch and transformers, on a machine that may be busy
def test_the_demo_trains_stops_resumes_exports_and_writes(tmp_path: Path) -> None:
    result = demo("--steps", "6", "--vocabulary", "512", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    out = tmp_path / "runs" / "demo"

    losses = losses_of(out)
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6], "each step once, over the stop at 3"
    assert losses[-1][1] < losses[0][1]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "a new launch resumes at step 3" in result.stdout

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(out / "export", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(out / "export").vocab_size == model.config.vocab_size == 512

    if not ALL_CASES:  # tests/checkpoint/test_resume.py holds the same for every stage
        return
    # The stop changes nothing: one straight launch on the same corpus has the same losses to the last bit.
    straight = tmp_path / "straight"
    straight.mkdir()
    for name in ("corpus.json", "tokenizer.json"):
        shutil.copy(out / name, straight)
    run_ranks(2, _train_straight, str(tmp_path), timeout=300)
    assert losses_of(straight) == losses

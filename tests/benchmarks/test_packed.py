"""The benchmark of bases in 4 bits finds the largest model of a plan, and runs as a whole on a processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.packed import most_layers, predict
from benchmarks.packed_model import Width
from tests.support.installed import need
from zeroshard.planner.machine.hardware import parse_cluster

need("transformers", "peft")
ROOT = Path(__file__).parents[2]
WIDTH = Width(hidden=256, heads=4, kv_heads=2, ffn=512, vocabulary=512, layers=1)


def test_one_layer_more_would_not_fit(tmp_path: Path) -> None:
    cluster, length = parse_cluster("1xH200-141GB"), 64
    allowed = predict(WIDTH.deep(12), length, cluster, tmp_path).peak.total + 10_000
    layers, found = most_layers(WIDTH, length, cluster, allowed, tmp_path)
    assert layers == 12
    assert found.peak.total <= allowed < predict(WIDTH.deep(13), length, cluster, tmp_path).peak.total


@pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")
def test_the_command_runs_without_a_gpu() -> None:
    need("bitsandbytes")
    given = ["--stages", "--saved", "--layers", "2", "--width", "tiny", "--length", "64"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", "packed", *given],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    for told in ("stage 3, off ", "merged, by transformers: logits off by", "plan of 2 layers"):
        assert told in ended.stdout

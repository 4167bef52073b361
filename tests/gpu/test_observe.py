"""With everything on that can be seen of a run no step makes the host wait for the device, whose waits are timed."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from benchmarks.llama import Llama
from tests.gpu.test_training import BACKEND, BATCH, GPUS, LENGTH, SHAPE
from tests.support.distributed import run_ranks
from zeroshard.observe.runs.log import read_run

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
STEPS = 16


def _config(folder: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "wall_clock_breakdown": True,
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True, "output_file": f"{folder}/flops"},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        "run_log": {"path": f"{folder}/run.jsonl"},
    }


def _watched(rank: int, world: int, folder: str) -> float:
    torch.manual_seed(0)
    engine, *_ = zeroshard.initialize(model=Llama(SHAPE), config=_config(folder))
    for step in range(STEPS):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")  # tables of kernels, and the counted step
        for _ in range(2):
            tokens = torch.randint(SHAPE.vocabulary, (BATCH, LENGTH), device="cuda")
            engine.backward(engine(tokens, tokens))
            engine.step()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    tflops = engine.tput_timer.avg_tflops()
    engine.destroy()
    return tflops


def test_no_step_waits_for_the_device_with_everything_on(tmp_path: Path) -> None:
    tflops = run_ranks(GPUS, _watched, str(tmp_path), backend=BACKEND)
    assert min(tflops) > 0
    run = read_run(tmp_path / "run.jsonl")
    assert [step.step for step in run.steps] == list(range(1, STEPS + 1))
    assert all(step.loss is not None and math.isfinite(step.loss) and step.norm for step in run.steps)
    assert all(0 < sum(step.seconds.values()) <= 1.01 * (step.whole or 0.0) for step in run.steps[1:])
    timed = [step for step in run.steps if step.device_waits is not None]
    assert [step.step for step in timed] == [8, 16]
    for step in timed:
        assert step.device_waits is not None
        assert set(step.device_waits["forward"]) == {"all-gather"}
        assert "reduce-scatter" in {kind for waits in step.device_waits.values() for kind in waits}
        for part, waits in step.device_waits.items():
            assert 0 <= sum(waits.values()) <= step.seconds.get(part, 0.0)
    with (tmp_path / "job" / "Train_Samples_train_loss.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == STEPS + 1

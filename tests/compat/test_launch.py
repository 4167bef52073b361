"""Commands that users type: `accelerate launch` with a config of DeepSpeed, and `ds_report`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.compat import tiny
from tests.support.installed import need

pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")
need("accelerate")
CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": "auto"}},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
SCRIPT = """
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DummyOptim, DummyScheduler

accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
rows = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.ones(64, 1))
optimizer = DummyOptim(model.parameters(), lr=1e-2)
scheduler = DummyScheduler(optimizer)
loader = torch.utils.data.DataLoader(rows, batch_size=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses = []
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
accelerator.save_model(model, "out")
assert sum(losses[-4:]) < sum(losses[:4]) / 2, losses
assert scheduler.get_last_lr() == [1e-2], scheduler.get_last_lr()
stage = accelerator.state.deepspeed_plugin.zero_stage
accelerator.print("ended:", type(model).__name__, accelerator.num_processes, stage)
"""


@pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")
def test_accelerate_launch_takes_a_deepspeed_config(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--deepspeed_config_file", "ds.json", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=tiny.environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "ended: DeepSpeedEngine 2 3" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")
def test_ds_report_says_what_the_machine_has() -> None:
    command = [sys.executable, "-c", "from deepspeed.env_report import cli_main; cli_main()"]
    done = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "zeroshard under DeepSpeed's import name" in done.stdout
    assert f"torch {torch.__version__}" in done.stdout
    assert "host memory" in done.stdout

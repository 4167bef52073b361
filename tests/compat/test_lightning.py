"""Lightning's DeepSpeedStrategy: trains as under its DDP, saves and resumes. `ZEROSHARD_HF_TESTS=1`, with lightning.

In the resumed half some gradients are above the norm to which they are clipped and some below, so their size matters.

Lightning asks for a GPU with this strategy; the script replaces its two checks, so that it runs on CPUs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat import tiny

pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")
pytestmark = [
    pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1"),
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
]
SCRIPT = """
import json, sys
import lightning.fabric.strategies.deepspeed as fabric
import lightning.pytorch as pl
import lightning.pytorch.strategies.deepspeed as strategies
import torch
from lightning.pytorch.accelerators import CPUAccelerator

strategies.CUDAAccelerator = CPUAccelerator
strategies._validate_device_index_selection = fabric._validate_device_index_selection = lambda *_: None


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.seen = []

    def configure_model(self):
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.seen.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, index):
        self.log("val", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4)]


def fit(stage, steps, path=None):
    gloo = {"process_group_backend": "gloo"}
    made = pl.strategies.DDPStrategy if stage is None else pl.strategies.DeepSpeedStrategy
    strategy = made(**gloo) if stage is None else made(stage=stage, **gloo)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, logger=False,
                         enable_progress_bar=False, gradient_clip_val=1.0, accumulate_grad_batches=2)
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(rows, torch.ones(64, 1))
    net = Net()
    trainer.fit(net, *(torch.utils.data.DataLoader(data, batch_size=size) for size in (4, 8)), ckpt_path=path)
    return trainer, net


stage, steps, source, target = json.loads(sys.argv[1])
trainer, net = fit(stage, steps, source)
trainer.save_checkpoint(target)
if trainer.global_rank == 0:
    print("SEEN", json.dumps([*net.seen, float(trainer.callback_metrics["val"])]), flush=True)
"""


def _run(folder: Path, stage: int | None, steps: int, source: str | None, target: str) -> list[float]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        [*command, json.dumps([stage, steps, source, target])],
        cwd=folder,
        env=tiny.environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("SEEN ")[1].splitlines()[0])


def test_lightning_trains_saves_and_resumes_as_under_ddp(tmp_path: Path) -> None:
    expected = [_run(tmp_path, None, 4, None, "half.ckpt"), _run(tmp_path, None, 8, "half.ckpt", "whole.ckpt")]
    for stage in (2, 3):
        seen = [
            _run(tmp_path, stage, 4, None, f"half-{stage}"),
            _run(tmp_path, stage, 8, f"half-{stage}", f"whole-{stage}"),
        ]
        gaps = [max(abs(a - b) for a, b in zip(*runs, strict=True)) for runs in zip(seen, expected, strict=True)]
        print(f"Lightning, stage {stage}: trained {gaps[0]:.1e}, resumed {gaps[1]:.1e}")
        assert max(gaps) < 2e-6, (stage, seen, expected)
        there = {path.name for path in (tmp_path / f"half-{stage}").iterdir()}
        assert there == {"checkpoint", "latest", "zero_to_fp32.py"}

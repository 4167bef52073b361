"""A config's offload to disk: trained to the bits of offload to host memory, saved, and refused where it can't be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from tests.support.disk import disk_folder, spill_descriptors
from tests.support.training import assert_same, full_parameters
from tests.test_initialize import build, loss_of
from zeroshard.engine.engine import Engine
from zeroshard.errors import ConfigError, PlanError

AIO = {
    "block_size": 1048576,
    "queue_depth": 16,
    "intra_op_parallelism": 2,
    "thread_count": 1,
    "single_submit": True,
    "overlap_events": True,
}
DEEPSPEEDS = {"pin_memory": True, "buffer_count": 4, "pipeline_read": True, "pipeline_write": True, "fast_init": True}


def _config(stage: int, **offload: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "offload_optimizer": offload},
        "aio": AIO,
    }


def _start(config: dict[str, Any]) -> Engine:
    engine, *_ = zeroshard.initialize(model=build(), config=config)
    return engine


def _train(engine: Engine, steps: range) -> None:
    for step in steps:
        for micro in range(2):
            engine.backward(loss_of(engine, step, micro))
            engine.step()


def test_a_config_trains_and_saves_with_state_on_disk(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        for stage in (1, 3):
            host, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(folder), **DEEPSPEEDS}
            found: list[dict[str, torch.Tensor]] = []
            for offload in (host, disk):
                engine = _start(_config(stage, **offload))
                assert len(spill_descriptors(folder)) == (offload is disk)
                _train(engine, range(2))
                engine.save_checkpoint(str(tmp_path / f"saved-{stage}"), tag=offload["device"])
                _train(engine, range(2, 3))
                found.append(full_parameters(engine.module))
                engine.destroy()
            engine = _start(_config(stage, **disk))
            engine.load_checkpoint(str(tmp_path / f"saved-{stage}"), tag="cpu")
            _train(engine, range(2, 3))
            found.append(full_parameters(engine.module))
            engine.destroy()
            for other in found[1:]:
                assert_same(other, found[0], f"stage {stage}")


def test_a_wrong_folder_is_refused_by_initialize(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "none", "does not exist"), ("/dev/shm", r"is in memory \(tmpfs\)")):
        if Path(path).exists() or "shm" not in str(path):
            with pytest.raises(PlanError, match=f"rank 0: {path} {told}"):
                _start(_config(3, device="nvme", nvme_path=str(path)))
    with pytest.raises(ConfigError, match="set nvme_path beside it"):
        _start(_config(3, device="nvme"))

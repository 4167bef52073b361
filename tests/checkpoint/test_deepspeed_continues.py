"""A run of DeepSpeed goes on here: from its checkpoint, with the losses that DeepSpeed itself went on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.checkpoint.deepspeed.make_fixtures import CASES, build_model
from tests.checkpoint.test_deepspeed import CHECKPOINTS, opened, truth
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.native import write_native
from zeroshard.engine.engine import Engine
from zeroshard.engine.outside_step.gathered import full_state_dict

STEPS, MORE = 3, 4


def start(case: str, stage: int) -> Engine:
    model = build_model(case)
    named = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in named if p.dim() >= 2], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [p for p in named if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": [1e-2, 3e-3]}},
        **{key: value for key, value in CASES[case].items() if key in ("fp16", "bf16")},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    return zeroshard.initialize(model=model, optimizer=optimizer, config=config)[0]


def go_on(rank: int, world_size: int, folder: Path) -> None:
    for case, stage in (("zero1", 3), ("zero1_bf16_optimizer", 1), ("zero3", 2)):
        if rank == 0 and not (folder / case).exists():
            write_native(opened(case), folder / case, "imported")
        dist.barrier()
        facts = json.loads((CHECKPOINTS / case / "truth.json").read_text())
        engine = start(case, stage)
        _, client = engine.load_checkpoint(folder / case)
        assert client == {"epoch": 2, "note": "from the caller"}
        assert engine.global_steps == facts["steps"]
        assert engine.get_lr() == facts["lr"]
        if "fp16" in CASES[case]:
            assert engine.loss_scale == facts["scale"]
        expected = truth(case)
        for name, value in full_state_dict(engine.module).items():
            if f"{name}|fp32" in expected:
                assert torch.equal(value, expected[f"{name}|fp32"]), (case, stage, name)
        generator = torch.Generator().manual_seed(100 + rank)
        for _ in range(STEPS):
            torch.randint(0, 13, (2, 6), generator=generator)
        losses = []
        for _ in range(MORE):
            loss = engine(torch.randint(0, 13, (2, 6), generator=generator))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        # Bit for bit on the machine that made the fixtures, but for stage 3, where DeepSpeed's linear layers round
        # otherwise in bf16; another processor may sum 16-bit products in another order.
        assert losses == pytest.approx(facts["next_losses"][rank], abs=4e-3), (case, stage)
        engine.destroy()


def test_the_losses_go_on_as_in_deepspeed(tmp_path: Path) -> None:
    run_ranks(2, go_on, tmp_path)

"""Remake the DeepSpeed checkpoints that the tests of import read.

    python -m venv ds && ds/bin/pip install deepspeed==0.19.8 torch safetensors numpy
    DS_ACCELERATOR=cpu ds/bin/python tests/checkpoint/deepspeed/make_fixtures.py

Each case trains a tiny model for a few steps in two processes on gloo, saves with DeepSpeed's own `save_checkpoint`,
and asks DeepSpeed's own accessors for the master weights and moments of every parameter. What they say lies beside the
checkpoint as `truth.safetensors` and `truth.json`; the tests compare with it bit by bit. The universal cases are made
from two of the others by DeepSpeed's converter. `zeroshard` is not imported here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHECKPOINTS = HERE / "checkpoints"
STEPS = 3
MORE = 4  # steps after the save, of which only the losses are kept

# Why each is there: fp16 has a loss scaler; bf16 with fp32 gradients takes DeepSpeed's third optimizer; the small
# sub-groups cut stage 3's flat groups in the middle of the parameter list; round robin reorders a group and alignment
# puts padding between parameters (with round robin alone DeepSpeed's accessors and converter mix parameters up).
CASES: dict[str, dict[str, Any]] = {
    "zero1": {"fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": {"stage": 1}},
    "zero1_bf16_optimizer": {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
    },
    "zero2": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True},
    },
    "zero3": {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 40,
            "stage3_param_persistence_threshold": 10,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
}
UNIVERSAL = {"universal_from_zero1": "zero1", "universal_from_zero3": "zero3"}


def build_model(case: str) -> Any:
    import torch
    from torch import nn

    class Tiny(nn.Module):
        """Tied head, frozen layer, buffers of both kinds, sizes that two ranks can't halve, an empty parameter."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 7)
            self.norm = nn.LayerNorm(7)
            self.first = nn.Linear(7, 9)
            self.frozen = nn.Linear(9, 5)
            self.second = nn.Linear(5, 7, bias=False)
            self.empty = nn.Parameter(torch.empty(0, 4)) if case != "zero3" else None  # that fails to gather one
            self.scale = nn.Parameter(torch.ones(1))
            self.head = nn.Linear(7, 13, bias=False)
            self.head.weight = self.embed.weight
            self.frozen.requires_grad_(False)
            self.register_buffer("seen", torch.tensor([3, 1], dtype=torch.int64))
            self.register_buffer("mean", torch.linspace(0, 1, 7))
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.embed(tokens)) + self.mean.to(self.embed.weight.dtype)
            x = self.second(self.frozen(torch.tanh(self.first(x)))) * self.scale
            x = x if self.empty is None else x + self.empty.sum()
            logits = self.head(x).float()
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())

    torch.manual_seed(5)
    return Tiny()


def train(case: str, folder: Path) -> None:
    """One rank of one case."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file

    # DeepSpeed thinks that no CPU computes in fp16; torch does.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    model = build_model(case)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": [1e-2, 3e-3]}},
        "steps_per_print": 1000000,
        **CASES[case],
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(100 + engine.global_rank)

    def step() -> float:
        loss = engine(torch.randint(0, 13, (2, 6), generator=generator))
        engine.backward(loss)
        engine.step()
        return loss.item()

    for _ in range(STEPS):
        step()
    engine.save_checkpoint(str(folder), tag="step3", client_state={"epoch": 2, "note": "from the caller"})

    if case != "zero3":
        # DeepSpeed's accessors see the moments of the first group only: it looks for them too early.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    truth: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and name != "empty":
            truth[f"{name}|fp32"] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                truth[f"{name}|{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
        with deepspeed.zero.GatheredParameters([parameter]) if case == "zero3" else _nothing():
            truth[f"{name}|compute"] = parameter.detach().clone()
    for name, buffer in engine.module.named_buffers():
        truth[f"{name}|buffer"] = buffer.clone()
    scale = getattr(optimizer, "cur_scale", None) or getattr(optimizer, "loss_scale", 1.0)
    facts = {
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps,
        "samples": engine.global_samples,
        "scale": float(scale),
        "lr": [group["lr"] for group in optimizer.param_groups],
        "scheduler": scheduler.state_dict(),
    }
    losses: list[Any] = [None, None]
    torch.distributed.all_gather_object(losses, [step() for _ in range(MORE)])
    if engine.global_rank == 0:
        save_file({name: value.contiguous() for name, value in truth.items()}, folder / "truth.safetensors")
        (folder / "truth.json").write_text(json.dumps({**facts, "next_losses": losses}, indent=1) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def launch(case: str) -> None:
    folder = CHECKPOINTS / case
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29713",
        }
        ranks.append(subprocess.Popen([sys.executable, __file__, case, str(folder)], env=environment))
    if any(process.wait() for process in ranks):
        raise SystemExit(f"{case} failed")
    for script in folder.glob("zero_to_*.py"):
        script.unlink()


def convert(case: str, source: str) -> None:
    folder = CHECKPOINTS / case
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
    command += ["--num_merge_workers", "1", "--inject_missing_state"]
    command += ["--input_folder", str(CHECKPOINTS / source / "step3"), "--output_folder", str(folder / "step3")]
    subprocess.run(command, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    for name in ("truth.safetensors", "truth.json"):
        shutil.copy(CHECKPOINTS / source / name, folder / name)


def main() -> None:
    if len(sys.argv) == 3:
        train(sys.argv[1], Path(sys.argv[2]))
        return
    for case in CASES:
        launch(case)
    for case, source in UNIVERSAL.items():
        convert(case, source)


if __name__ == "__main__":
    main()

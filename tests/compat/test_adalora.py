"""AdaLoRA of peft: ranks that it takes away after each step, from gradients that the step has consumed by then.

Of `ZEROSHARD_HF_TESTS=1`, as the matrix.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat import tiny
from tests.support.distributed import run_ranks
from tests.support.installed import need

pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")
need("accelerate", "peft", "transformers")
pytestmark = pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")
STEPS = 7


def _adapted(model: Any) -> Any:
    from peft import AdaLoraConfig, get_peft_model

    torch.manual_seed(7)
    schedule = {"tinit": 1, "tfinal": 2, "deltaT": 1, "total_step": STEPS, "orth_reg_weight": 0.1}
    config = AdaLoraConfig(
        init_r=6,
        target_r=2,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        **schedule,
    )
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_E" in name:  # from 0, as peft has it, the ranks are all worth the same at first
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return adapted


def _allocate(steps: list[str]) -> Any:
    """The callback that a script with AdaLoRA has; it notes which ranks are left."""
    from transformers import TrainerCallback

    class Allocate(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.update_and_allocate(state.global_step + 1)
            pattern = model.peft_config["default"].rank_pattern
            steps.append(str({name: torch.as_tensor(kept).int().tolist() for name, kept in (pattern or {}).items()}))

    return Allocate()


def _train(base: str, stage: int | None, **settings: Any) -> tuple[tiny.Run, list[str]]:
    arguments = tiny.arguments(
        Path(base, f"run-{stage}"), stage, {}, max_steps=STEPS, max_grad_norm=0.5, eval_steps=3, **settings
    )
    from transformers import AutoModelForCausalLM

    steps: list[str] = []
    model = AutoModelForCausalLM.from_pretrained(Path(base, "start"), dtype="float32")  # under ZeRO-3 it comes sharded
    run = tiny.trainer(arguments, _adapted(model), callbacks=[_allocate(steps)])
    run.train()
    if stage is not None:
        run.model_wrapped.destroy()
    tiny.forget()
    return tiny.logged(run), steps


def _as_under_ddp(rank: int, world: int, base: str) -> None:
    if rank == 0:
        tiny.model().save_pretrained(Path(base, "start"))
    dist.barrier()
    plain, ranks = _train(base, None)
    assert len({*ranks}) > 2  # it does take ranks away
    for stage in range(4):
        run, steps = _train(base, stage)
        gap = run.largest_gap(plain)
        if rank == 0:
            print(f"AdaLoRA, stage {stage}: {gap:.1e}")
        assert gap < 2e-6, (stage, gap)
        assert steps == ranks


def test_adalora_takes_the_same_ranks_away_as_under_ddp(tmp_path: Path) -> None:
    run_ranks(2, _as_under_ddp, str(tmp_path), timeout=200)

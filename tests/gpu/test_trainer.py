"""On GPUs: transformers' Trainer and Accelerate train under ZeRO as they do without it.

Run by `pytest tests/gpu` on a machine with GPUs where transformers, accelerate and zeroshard-deepspeed are installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat import tiny
from tests.gpu.test_training import BACKEND, GPUS, on_gpu
from tests.support.distributed import run_ranks
from tests.support.installed import need

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")
need("accelerate", "transformers")

HOST = {"device": "cpu", "pin_memory": True}


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}


LOW = ("bf16", "fp16")
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], float]] = {
    "stage 1": (1, {}, {}, 1e-4),
    "stage 2, accumulated": (2, {}, {"gradient_accumulation_steps": 2}, 1e-4),
    "stage 3": (3, {}, {}, 1e-4),
    "stage 3, overlapped": (3, _zero(3, overlap_comm=True), {}, 1e-4),
    "bf16": (3, {}, {"bf16": True}, 1e-1),
    "fp16": (2, {"fp16": {"enabled": "auto", "initial_scale_power": 8}}, {"fp16": True}, 1e-1),
    "checkpointed blocks": (3, {}, {"gradient_checkpointing": True}, 1e-4),
    "state on the host": (2, _zero(2, offload_optimizer=HOST), {}, 1e-4),
    "all on the host": (3, _zero(3, offload_optimizer=HOST, offload_param=HOST), {}, 1e-4),
    "the config's own optimizer": (3, {"optimizer": tiny.AUTO_OPTIMIZER}, {}, 1e-4),
}


def _run(folder: Path, stage: int | None, config: Mapping[str, Any], settings: Mapping[str, Any]) -> tiny.Run:
    model = tiny.model("llama")  # under arguments for stage 3 it would be built sharded, by other random numbers
    run = tiny.trainer(tiny.arguments(folder, stage, config, use_cpu=False, **settings), model)
    run.train()
    assert next(run.model.parameters()).is_cuda
    found = tiny.logged(run)
    if stage is not None:
        run.model_wrapped.destroy()
    tiny.forget()
    return found


def _trains(rank: int, world: int, base: str) -> None:
    on_gpu(rank)
    for number, (name, (stage, config, settings, far)) in enumerate(CASES.items()):
        # In float32: of low precisions torch's autocast trains something else, and its first scale may overflow.
        plain = {key: value for key, value in settings.items() if key not in LOW}
        expected = _run(tiny.shared_folder(base, f"plain-{number}"), None, {}, plain)
        gap = _run(tiny.shared_folder(base, f"zero-{number}"), stage, config, settings).largest_gap(expected)
        assert gap < far, f"{name}: {gap}"


@pytest.mark.parametrize("world", sorted({1, GPUS}))
def test_trainer_gives_the_numbers_of_plain_training(world: int, tmp_path: Path) -> None:
    run_ranks(world, _trains, str(tmp_path), backend=BACKEND, timeout=300)


def _resumes(rank: int, world: int, base: str) -> None:
    on_gpu(rank)
    settings = {"save_strategy": "steps", "save_steps": 2}
    arguments = tiny.arguments(tiny.shared_folder(base, "first"), 3, {}, use_cpu=False, **settings)
    run = tiny.trainer(arguments, tiny.model("llama"))
    run.train()
    first = tiny.logged(run)
    run.save_model(str(tiny.shared_folder(base, "model")))
    run.model_wrapped.destroy()
    tiny.forget()
    arguments = tiny.arguments(tiny.shared_folder(base, "second"), 3, {}, use_cpu=False, **settings)
    again = tiny.trainer(arguments, tiny.model("llama"))
    again.train(resume_from_checkpoint=str(Path(base, "first", "checkpoint-2")))
    assert tiny.logged(again).largest_gap(first) < 1e-5
    again.model_wrapped.destroy()
    tiny.forget()
    assert Path(base, "model", "model.safetensors").stat().st_size > 0


@pytest.mark.parametrize("world", sorted({1, GPUS}))
def test_trainer_resumes_from_its_checkpoint(world: int, tmp_path: Path) -> None:
    run_ranks(world, _resumes, str(tmp_path), backend=BACKEND, timeout=200)


def _accelerates(rank: int, world: int, base: str) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin

    on_gpu(rank)
    rows = torch.randint(0, 128, (16, 9), generator=torch.Generator().manual_seed(1))

    def train(plugin: DeepSpeedPlugin | None) -> list[float]:
        model = tiny.model("gpt2")
        accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin)
        loader = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        numbers = tiny.accelerate_loop(accelerator, model, optimizer, loader, 2)
        accelerator.free_memory()
        tiny.forget()
        return numbers

    expected = train(None)
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0, gradient_accumulation_steps=2, zero3_init_flag=False)
    assert train(plugin) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("world", sorted({1, GPUS}))
def test_accelerate_gives_the_numbers_of_plain_training(world: int, tmp_path: Path) -> None:
    run_ranks(world, _accelerates, str(tmp_path), backend=BACKEND, timeout=200)

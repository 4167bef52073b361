"""On a GPU: a base in 4 bits with LoRA trains at stages 0 to 3 with the losses of one process, and what is saved opens.

Ranks share the GPU, each a process of its own, as in test_shared_gpu: codes and scales are copied from peers or sent
over gloo. Run by `pytest tests/gpu` where bitsandbytes, transformers and peft are installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from benchmarks.packed_model import Width, adapted, base, batch
from benchmarks.packed_saved import saved
from tests.gpu.test_shared_gpu import ENVIRONMENT
from tests.gpu.test_training import GPUS
from tests.support.distributed import run_ranks
from tests.support.installed import need
from zeroshard.plan.builder import Recipe
from zeroshard.plan.placement import STAGES
from zeroshard.plan.policy import ExecutionPolicy

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
need("transformers", "peft", "bitsandbytes")

BACKEND = "cpu:gloo,cuda:gloo"
WIDTH = Width(hidden=512, heads=8, kv_heads=4, ffn=2048, vocabulary=1024, layers=3)
LENGTH, STEPS, CLIP = 256, 4, 1.0
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.01}


def _model(device: torch.device) -> nn.Module:
    return adapted(base(WIDTH, LENGTH, device, torch.float32), device, trained=True)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _alone(device: torch.device, rank: int, world: int) -> list[float]:
    """Losses of this rank's batches in plain torch, which sees all batches."""
    model = _model(device)
    optimizer = torch.optim.AdamW(_trained(model), **OPTIMIZER)
    losses: list[float] = []
    for step in range(STEPS):
        found = [model(**batch(WIDTH, LENGTH, device, step, peer)).loss for peer in range(world)]
        torch.stack(found).mean().backward()
        nn.utils.clip_grad_norm_(_trained(model), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found[rank].detach()))
    return losses


def _sharded(device: torch.device, rank: int, recipe: Recipe) -> list[float]:
    with zeroshard.QuantizedInit() if recipe.sharding is STAGES[3] else nullcontext():
        model = _model(device)
    optimizer = torch.optim.AdamW(_trained(model), **OPTIMIZER)
    model, optimizer = zeroshard.shard(model, optimizer, plan=recipe, device=device)
    losses: list[float] = []
    for step in range(STEPS):
        loss = model(**batch(WIDTH, LENGTH, device, step, rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    zeroshard.close(model)
    return losses


def _recipes(world: int) -> Iterator[Recipe]:
    for stage in range(4):
        for peers in (False, True) if stage and world > 1 else (False,):
            policy = ExecutionPolicy(clip_norm=CLIP)
            yield Recipe(sharding=STAGES[stage], policy=policy, peer_copies=peers)


def _trains(rank: int, world: int) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    expected = _alone(device, rank, world)
    assert len(set(expected)) == STEPS
    for recipe in _recipes(world):
        got = _sharded(device, rank, recipe)
        assert got == pytest.approx(expected, rel=1e-5), (recipe.sharding, recipe.peer_copies)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_base_in_4_bits_trains_as_in_one_process(world: int) -> None:
    run_ranks(world, _trains, backend=BACKEND, env=ENVIRONMENT, timeout=240)


def _saves(rank: int, world: int, folder: str) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    assert saved(WIDTH, LENGTH, device, Path(folder))


def test_what_is_saved_of_it_is_opened_by_transformers(tmp_path: Path) -> None:
    run_ranks(1, _saves, str(tmp_path), backend=BACKEND, env=ENVIRONMENT, timeout=240)

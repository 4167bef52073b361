"""float64 parameters are updated in float64, as torch does; optimizers that compute in float32 are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.errors import PlanError
from zeroshard.plan.builder import Recipe
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "a rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5)).double()


def _batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 7, generator=generator, dtype=torch.float64)


def _plain(make: Make, world: int, clip: float, micro: int) -> dict[str, torch.Tensor]:
    model = _model()
    optimizer = make(model.parameters())
    for step in range(3):
        for part in range(micro):
            for rank in range(world):
                (model(_batch(10 * step + part, rank)).square().mean() / world / micro).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _sharded(make: Make, plan: int | Recipe, rank: int, clip: float, micro: int) -> dict[str, torch.Tensor]:
    model = _model()
    model, optimizer = zeroshard.shard(model, make(model.parameters()), plan=plan, clip_norm=clip, accumulate=micro > 1)
    for step in range(3):
        for part in range(micro):
            (model(_batch(10 * step + part, rank)).square().mean() / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}
    zeroshard.close(model)
    return found


def _close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    for name, value in found.items():
        assert value.dtype == torch.float64, what
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14, msg=lambda text: f"{what}: {text}")


def _trains(rank: int, world: int, name: str) -> None:
    make = OPTIMIZERS[name]
    for clip, micro in ((0.0, 1), (0.05, 1), (0.05, 2)):
        expected = _plain(make, world, clip, micro)
        for stage in range(4):
            _close(_sharded(make, stage, rank, clip, micro), expected, f"{name}, stage {stage}, {clip}, {micro}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_float64_is_torchs_at_every_stage(name: str) -> None:
    run_ranks(2, _trains, name)


def _on_host(rank: int, world: int) -> None:
    for name in ("momentum", "AdamW"):
        expected = _plain(OPTIMIZERS[name], world, 0.05, 1)
        for param in (False, True):
            recipe = Recipe(sharding=STAGES[3], offload=Offload(param=param))
            _close(_sharded(OPTIMIZERS[name], recipe, rank, 0.05, 1), expected, f"{name} on the host")


def test_state_in_host_memory_is_float64_too() -> None:
    run_ranks(2, _on_host)


def _continues(rank: int, world: int, directory: str) -> None:
    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        model(_batch(number, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    outcomes = []
    on_host = Recipe(STAGES[2], offload=Offload())  # master weights, in float64 too, beside the device's parameters
    for plan, saves, loads in ((3, "a", ""), (on_host, "b", "a"), (1, "c", "b"), (3, "", "c"), (on_host, "", "b")):
        model = _model()
        model, optimizer = zeroshard.shard(model, OPTIMIZERS["AdamW"](model.parameters()), plan=plan)
        if loads:
            zeroshard.load(model, directory, loads)
        else:
            step(model, optimizer, 0)
        if saves:
            zeroshard.save(model, directory, saves, background=saves == "c")
            zeroshard.wait_for_checkpoint(model)
        step(model, optimizer, 1)
        outcomes.append({name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)})
        zeroshard.close(model)
    for found in outcomes:
        for name, value in found.items():
            torch.testing.assert_close(value, outcomes[0][name], rtol=1e-14, atol=1e-15)


def test_a_checkpoint_keeps_every_bit_of_it(tmp_path: Path) -> None:
    run_ranks(2, _continues, str(tmp_path))


@pytest.mark.parametrize("kind", [zeroshard.Lamb, zeroshard.OneBitAdam])
def test_an_optimizer_that_computes_in_float32_is_refused(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model = _model()
    with pytest.raises(PlanError, match=r"parameter '0.weight' is float64, but \w+ is computed in float32"):
        zeroshard.shard(model, lambda parameters: kind(parameters), plan=1)

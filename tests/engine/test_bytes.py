"""The plan's bytes and traffic are what the ranks hold and what the process groups are given: equal to the byte."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.cases import only_with_all_cases, sample
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, live_bytes, sent
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.placement import STAGES
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.plan.traffic import step_traffic

WIDTH = 20
FP32, BF16 = Precision(), Precision("bfloat16")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 33)
        self.down = nn.Linear(33, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Model(nn.Module):
    """Five blocks, used in the order given; a root before and after."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2, 3, 4), frozen: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(5))
        self.out = nn.Linear(WIDTH, 3)
        self.order = order
        if frozen:
            self.inp.requires_grad_(False)
            self.blocks[1].requires_grad_(False)
            self.blocks[2].up.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.out(x)


@dataclass(frozen=True)
class _Case:
    stage: int = 3
    precision: Precision = FP32
    micro: int = 1
    no_sync: bool = False
    reuse: bool = True
    prefetch: int = 1
    threshold: int = 0
    frozen: bool = False
    order: tuple[int, ...] = (0, 1, 2, 3, 4)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    accumulate: bool | None = None

    @property
    def recipe(self) -> Recipe:
        policy = ExecutionPolicy(
            prefetch=self.prefetch,
            reuse=self.reuse,
            accumulate=self.micro > 1 if self.accumulate is None else self.accumulate,
            cast_inputs=self.precision.param,
        )
        return Recipe(STAGES[self.stage], {}, self.precision, policy, persistence_threshold=self.threshold)


def _build(case: _Case) -> tuple[nn.Module, ShardedOptimizer]:
    torch.manual_seed(0)
    model = _Model(case.order, case.frozen)
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    _, sharded = zeroshard.shard(model, optimizer, plan=case.recipe)
    assert sharded is not None
    return model, sharded


def _step(model: nn.Module, optimizer: ShardedOptimizer, case: _Case) -> None:
    for micro in range(case.micro):
        with zeroshard.no_sync(model) if case.no_sync and micro < case.micro - 1 else nullcontext():
            model(torch.randn(4, 7)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _momentum(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


STATES = [
    _Case(precision=precision, accumulate=accumulate, frozen=frozen)
    for precision, accumulate in (
        (FP32, False),
        (FP32, True),
        (BF16, False),
        (BF16, True),
        (Precision("bfloat16", wire="float32"), False),
        (Precision("bfloat16", accumulate="bfloat16", keep_fp32=("norm",)), True),
    )
    for frozen in (False, True)
]
OTHERS = [
    _Case(optimizer=torch.optim.SGD),
    _Case(optimizer=_momentum, precision=BF16),
    _Case(prefetch=0),
    _Case(prefetch=3),
    _Case(threshold=100),
    _Case(order=(4, 1, 0, 3, 2), precision=BF16),
    _Case(order=(0, 1, 0, 2, 2)),
    _Case(no_sync=True, micro=3),
    _Case(no_sync=True, micro=3, precision=Precision("bfloat16", accumulate="bfloat16", wire="float32")),
]


def _cases(found: list[_Case], stages: tuple[int, ...]) -> Iterator[_Case]:
    for case in found:
        for stage in stages:
            yield replace(case, stage=stage)


def _check_memory(rank: int, world_size: int, found: list[_Case]) -> int:
    checked = 0
    for case in _cases(found, (0, 1, 2, 3)):
        gc.collect()
        gc.freeze()
        model, optimizer = _build(case)
        planned = state_bytes(zeroshard.plan_of(model))
        # Whole gradients under no_sync are taken when they are first needed.
        assert held_bytes(model) == replace(planned, no_sync=0), (case, "after init")
        assert (live_bytes(planned.total), case) == (planned.total, case), "after init"
        for _ in range(3):
            _step(model, optimizer, case)
        zeroshard.drain(model)
        planned = state_bytes(zeroshard.plan_of(model))
        expected = planned if case.no_sync else replace(planned, no_sync=0)
        assert held_bytes(model) == expected, (case, "after three steps")
        live = expected.total + expected.no_sync
        assert (live_bytes(live), case) == (live, case), "after three steps"
        zeroshard.close(model)
        checked += 1
    return checked


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=only_with_all_cases)])
def test_every_rank_holds_what_the_plan_says_and_not_a_byte_more(world_size: int) -> None:
    found = sample([*STATES, *OTHERS]) if world_size == 2 else STATES[::4]
    assert run_ranks(world_size, _check_memory, found) == [4 * len(found)] * world_size


def _check_torch_optimizer(rank: int, world_size: int) -> tuple[int, int, int]:
    case = _Case(precision=BF16, optimizer=torch.optim.Adadelta)
    model, optimizer = _build(case)
    _step(model, optimizer, case)
    plan = zeroshard.plan_of(model)
    padding = sum(group.layout.numel - group.layout.parameter_numel for _, group in plan.groups())
    return held_bytes(model).moments, state_bytes(plan).moments, padding * 4 * 2  # Adadelta has two states


def test_state_of_a_torch_optimizer_lacks_the_padding_only() -> None:
    held, planned, padding = zip(*run_ranks(2, _check_torch_optimizer), strict=True)
    assert sum(planned) - sum(held) == padding[0]


TRAFFIC = [
    _Case(),
    _Case(reuse=False),
    _Case(micro=3),
    _Case(micro=3, no_sync=True),
    _Case(micro=3, reuse=False),
    _Case(micro=3, reuse=False, no_sync=True),
    _Case(threshold=100),
    _Case(threshold=700, reuse=False),
    _Case(prefetch=0, reuse=False),
    _Case(prefetch=3),
    _Case(precision=BF16, micro=3),
    _Case(precision=Precision("bfloat16", wire="float32"), frozen=True),
    _Case(frozen=True, reuse=False),
    _Case(order=(4, 1, 0, 3, 2), reuse=False),
    _Case(order=(4, 1, 0, 3, 2), prefetch=2),
    _Case(order=(0, 1, 0, 2, 2)),
    _Case(order=(0, 1, 0, 2, 2), reuse=False, prefetch=3),
]


def _check_traffic(rank: int, world_size: int, found: list[_Case]) -> int:
    checked = 0
    for case in _cases(found, (0, 1, 2, 3)):
        model, optimizer = _build(case)
        for _ in range(2):
            _step(model, optimizer, case)
        forget_sent(model)
        _step(model, optimizer, case)
        measured = sent(model)
        plan = zeroshard.plan_of(model)
        never = [index for index in range(5) if index not in case.order]
        # One forward's, however many micro-batches the step has: else units are gathered over and over.
        assert [plan.units[unit].name for unit in plan.order[1:]] == [f"blocks.{i}" for i in (*case.order, *never)], (
            case
        )
        assert measured == step_traffic(plan, micro_batches=case.micro, no_sync=case.no_sync), case
        zeroshard.close(model)
        checked += 1
    return checked


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=only_with_all_cases)])
def test_the_process_groups_are_given_what_the_plan_says(world_size: int) -> None:
    found = sample(TRAFFIC) if world_size == 2 else TRAFFIC[::4]
    assert run_ranks(world_size, _check_traffic, found) == [4 * len(found)] * world_size

"""Random models, dtypes, frozen masks, optimizer groups and plans train as one unsharded process does.

Examples are drawn from a seed inside of one set of processes: starting ranks for each example would take longer than
all of them. A failure names the seed; `_check(rank, world, seed)` repeats it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.cases import only_with_all_cases
from tests.support.distributed import run_ranks
from tests.support.models import Batch, Task
from tests.support.training import Setting, assert_close, assert_same, shared_reference, train_sharded
from zeroshard.plan.builder import Recipe, build_plan
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES, Sharding
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy, HostUpdate
from zeroshard.sharding.layout import flat_layout
from zeroshard.sharding.units import find_units

WIDTHS = (1, 2, 3, 7, 13, 16, 31)
EXAMPLES = int(os.environ.get("ZEROSHARD_EXAMPLES", "6"))
"""For two ranks; half of it for one, three and four."""


class _Odd(nn.Module):
    """Adds parameters of unusual shape: without elements, with one, without dims."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, width))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.row = nn.Parameter(torch.randn(1, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scalar + self.row + self.nothing.sum()


class _Residual(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Expert(nn.Module):
    """Runs one of two paths, as the data says: parameters without a gradient, another one on each rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) if float(x.detach().float().sum()) > 0 else self.right(x)


class _Lookup(nn.Module):
    def __init__(self, width: int, entries: int) -> None:
        super().__init__()
        self.table = nn.Embedding(entries, width)
        self.entries = entries

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = (x.detach().float().abs().sum(-1) * 100).long() % self.entries
        return x + self.table(index)


PARTS: tuple[Callable[[random.Random, int], nn.Module], ...] = (
    lambda rng, width: nn.Linear(width, width, bias=rng.random() < 0.5),
    lambda rng, width: nn.LayerNorm(width),
    lambda rng, width: _Odd(width),
    lambda rng, width: _Residual(width, rng.choice(WIDTHS)),
    lambda rng, width: _Expert(width),
    lambda rng, width: _Lookup(width, rng.choice((1, 2, 17))),
)


@dataclass(frozen=True)
class Example:
    """One random case, all of it drawn from the seed."""

    seed: int
    width: int
    low: bool
    micro: int
    clip: float

    @staticmethod
    def draw(seed: int) -> Example:
        rng = random.Random(seed)
        return Example(
            seed, rng.choice(WIDTHS), rng.random() < 0.3, rng.choice((1, 1, 3)), 0.05 if rng.random() < 0.3 else 0.0
        )

    def build(self) -> nn.Module:
        """Repeated blocks of one random make between single parts, with a random frozen mask."""
        rng = random.Random(self.seed + 1)
        block = rng.sample(PARTS, rng.randint(1, 3))
        shape = rng.randrange(10**6)  # each block draws the same sizes
        blocks = [
            nn.Sequential(*(part(random.Random(shape), self.width) for part in block)) for _ in range(rng.randint(1, 4))
        ]
        parts = [rng.choice(PARTS)(rng, self.width), nn.Sequential(*blocks), nn.Linear(self.width, rng.choice(WIDTHS))]
        model = nn.Sequential(*parts)
        if rng.random() < 0.2:
            parts[2] = nn.Sequential(nn.Linear(self.width, self.width), nn.Linear(self.width, 3))
            model = nn.Sequential(*parts)
        for parameter in model.parameters():
            parameter.requires_grad_(rng.random() < 0.8)
        parts[-1].requires_grad_(True)
        return model.bfloat16() if self.low else model

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        x = batch.normal(2, self.width)
        return model(x.bfloat16() if self.low else x).float().square().mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """One to three groups with rates and decays of their own, dealt at random."""
        rng = random.Random(self.seed + 2)
        count = rng.randint(1, 3)
        dealt: list[list[nn.Parameter]] = [[] for _ in range(count)]
        for parameter in model.parameters():
            if parameter.requires_grad:
                dealt[rng.randrange(count)].append(parameter)
        kind = rng.choice((torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop))
        scale = 1.0 if kind is torch.optim.SGD else 0.1
        groups = [
            {"params": params, "lr": scale * rng.choice((0.01, 0.02)), "weight_decay": rng.choice((0.0, 0.1))}
            for params in dealt
            if params
        ]
        extra = {"momentum": 0.9} if kind is torch.optim.SGD else {"eps": 1e-4}
        return kind(groups, **extra)

    def recipe(self, stage: int, world: int) -> Recipe:
        """A stage, or (4) a mixture that no stage is, with a random prefetch and persistence."""
        rng = random.Random(self.seed + 3 + stage)
        policy = ExecutionPolicy(
            prefetch=rng.randint(0, 3),
            reuse=rng.random() < 0.7,
            overlap_step=rng.random() < 0.7,
            predivide=rng.choice((1.0, 1.0, 2.0)),
        )
        threshold = rng.choice((0, 0, 20))
        if stage < 4:
            return Recipe(STAGES[stage], policy=policy, persistence_threshold=threshold)
        names = [unit.name for unit in find_units(self.build())]
        overrides: dict[str, Sharding] = {name: STAGES[rng.randrange(4)] for name in names if rng.random() < 0.7}
        return Recipe(STAGES[3], overrides, policy=policy, persistence_threshold=threshold)

    def offloaded(self, world: int) -> Recipe:
        """A stage with its state in host memory: a random share, random pieces, updated by either."""
        rng = random.Random(self.seed + 9)
        stage, everything = rng.randint(1, 3), rng.random() < 0.6
        adam = isinstance(self.optimizer(self.build()), (torch.optim.Adam, torch.optim.AdamW))
        update = HostUpdate.STREAMED if adam and rng.random() < 0.5 else HostUpdate.PROCESSOR
        ratio = 1.0 if everything else rng.random()
        param = stage == 3 and everything and rng.random() < 0.6
        return replace(self.recipe(stage, world), offload=Offload(ratio, param, update, rng.choice((7, 64, 1 << 20))))


def _check(rank: int, world: int, seed: int) -> None:
    example = Example.draw(seed)
    task = Task(example.build, example.loss)
    setting = Setting(steps=3, micro=example.micro, clip=example.clip, optimizer=example.optimizer)
    reference = shared_reference(task, setting, world)
    exact = world <= 2 and example.micro == 1 and not example.clip
    first: dict[tuple[bool, bool], dict[str, torch.Tensor]] = {}
    for stage in range(5):
        what = f"{example}, world {world}, stage {stage}"
        recipe = example.recipe(stage, world)
        parameters = train_sharded(task, setting.at(recipe), rank).parameters
        if exact:
            assert_same(parameters, reference.parameters, what)
        else:
            # bf16 is sent in bf16: rounded per rank and micro-batch.
            assert_close(parameters, reference.parameters, 5e-3 if example.low else 3e-6, what)
        halved = recipe.policy.predivide != 1.0
        if example.micro == 1 and stage < 4:
            assert_same(parameters, first.setdefault((halved, False), parameters), what + " against another stage")
    recipe = example.offloaded(world)
    parameters = train_sharded(task, setting.at(recipe), rank).parameters
    # The host's and the device's kernels do not compute in torch's order.
    assert_close(parameters, reference.parameters, 5e-3 if example.low else 1e-5, f"{example}, {recipe}")


def _check_all(rank: int, world: int, seeds: list[int]) -> None:
    for seed in seeds:
        _check(rank, world, seed)


@pytest.mark.parametrize("world", [1, 2, *(pytest.param(more, marks=only_with_all_cases) for more in (3, 4))])
def test_random_models_train_as_unsharded(world: int) -> None:
    count = EXAMPLES if world == 2 else EXAMPLES // 2
    run_ranks(world, _check_all, [1000 * world + index for index in range(count)], timeout=200)


def test_a_unit_whose_only_trainable_parameters_have_no_element() -> None:
    run_ranks(2, _check_empty)


def _check_empty(rank: int, world: int) -> None:
    for micro in (1, 2):
        task = Task(_only_nothing_trains, lambda model, batch: model(batch.normal(2, 3)).square().mean())
        setting = Setting(micro=micro)
        reference = shared_reference(task, setting, world)
        for stage in range(4):
            outcome = train_sharded(task, setting.at(stage), rank)
            assert_close(outcome.parameters, reference.parameters, what=f"stage {stage}")


def _only_nothing_trains() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(_Odd(3), _Odd(3)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("0.") or name.endswith("nothing"))
    return model


def _plan(seed: int, stage: int, world: int) -> tuple[Example, Plan]:
    example = Example.draw(seed)
    torch.manual_seed(0)
    return example, build_plan(find_units(example.build()), example.recipe(stage, world), world)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), stage=st.integers(0, 4), world=st.integers(1, 9))
def test_plans_hold_every_parameter_once_and_round_trip(seed: int, stage: int, world: int) -> None:
    example, plan = _plan(seed, stage, world)
    assert Plan.from_json(plan.to_json()) == plan
    shapes = {name: tuple(parameter.shape) for name, parameter in example.build().named_parameters()}
    planned = [(segment.name, segment.shape) for _, group in plan.groups() for segment in group.layout.segments]
    assert len(planned) == len(shapes)
    assert dict(planned) == shapes
    state = state_bytes(plan)
    assert state.total >= state.state >= plan.parameter_numel * 2 // world


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=8),
    shards=st.integers(1, 9),
    itemsize=st.sampled_from((2, 4, 8)),
)
def test_layouts_are_aligned_disjoint_and_complete(shapes: list[tuple[int, ...]], shards: int, itemsize: int) -> None:
    layout = flat_layout(((f"p{index}", shape) for index, shape in enumerate(shapes)), shards=shards, itemsize=itemsize)
    assert layout.numel == layout.shard_numel * shards
    assert layout.shard_numel * itemsize % 256 == 0
    covered = [0] * layout.numel
    for segment in layout.segments:
        assert segment.offset * itemsize % 256 == 0
        for position in range(segment.offset, segment.end):
            covered[position] += 1
    for start, end in layout.gaps():
        for position in range(start, end):
            covered[position] += 1
    assert covered == [1] * layout.numel, "each element belongs to one parameter or to the padding"
    owned = [0] * len(shapes)
    for rank in range(shards):
        for index, low, high in layout.pieces(*layout.shard_range(rank)):
            owned[index] += high - low
    assert owned == [segment.numel for segment in layout.segments]

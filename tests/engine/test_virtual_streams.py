"""The engine's operations give the same bits in every order that the events allow, and a missing wait is caught."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.patience import Patience
from zeroshard.engine.core.streams import Event
from zeroshard.engine.core.virtual_streams import HazardError, Pace, VirtualStreams
from zeroshard.mesh import Mesh
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.legs import Stream
from zeroshard.plan.placement import STAGES
from zeroshard.plan.policy import ExecutionPolicy


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(_Block(12) for _ in range(5))
        self.out = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class _Field(_Model):
    """Differentiates between its blocks, down to its input, and goes on with what it found."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        hidden = self.inp(x)
        for block in self.blocks:
            hidden = block(hidden)
            (slope,) = torch.autograd.grad(hidden.square().sum(), x, retain_graph=True)
            hidden = hidden + slope.mean()
        return self.out(hidden)


def _train(
    streams: VirtualStreams | None,
    recipe: Recipe,
    rank: int,
    micro_batches: int,
    build: type[_Model] = _Model,
    mesh: Mesh | None = None,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zeroshard.shard(model, optimizer, plan=recipe, streams=streams, mesh=mesh)
    for step in range(3):
        for micro in range(micro_batches):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [value for _, value in zeroshard.iterate_full_parameters(model)]
    zeroshard.close(model)
    return [value.clone() for value in values]


def _recipe(stage: int, *, accumulate: bool, prefetch: int = 1, low: bool = False) -> Recipe:
    policy = ExecutionPolicy(
        overlap_step=prefetch > 0,
        prefetch=prefetch,
        accumulate=accumulate,
        clip_norm=0.5,
        cast_inputs="bf16" if low else None,
    )
    return Recipe(sharding=STAGES[stage], precision=Precision(param="bf16" if low else None), policy=policy)


def _paces(rank: int, *, all_of_them: bool) -> list[tuple[Pace, int]]:
    """Paces with their seeds; by default each kind of training meets the two that differ most from a GPU's."""
    paces = [(Pace.LAZY, 0), (Pace.MIXED, rank), (Pace.EAGER, 0), (Pace.MIXED, 7)]
    return paces if all_of_them or "ZEROSHARD_ALL_ORDERS" in os.environ else paces[:2]


def _all_orders(rank: int, world_size: int) -> int:
    checked = 0
    for stage in (0, 1, 2, 3):
        for micro_batches, low in ((1, False), (2, False), (2, True)):
            recipe = _recipe(stage, accumulate=micro_batches > 1, prefetch=stage % 3, low=low)
            plain = _train(None, recipe, rank, micro_batches)
            for pace, seed in _paces(rank, all_of_them=low):
                streams = VirtualStreams(Patience(), pace=pace, seed=seed)
                virtual = _train(streams, recipe, rank, micro_batches)
                assert all(torch.equal(a, b) for a, b in zip(plain, virtual, strict=True)), (stage, micro_batches, pace)
                checked += streams.checked
    return checked


def test_every_order_that_the_events_allow_gives_the_same_bits() -> None:
    for checked in run_ranks(2, _all_orders):
        assert checked > 1000


def _inner_gradients(rank: int, world_size: int) -> None:
    for stage, prefetch in ((1, 1), (3, 0), (3, 2)):
        recipe = _recipe(stage, accumulate=False, prefetch=prefetch)
        plain = _train(None, recipe, rank, 1, _Field)
        for pace, seed in _paces(rank, all_of_them=False):
            virtual = _train(VirtualStreams(Patience(), pace=pace, seed=seed), recipe, rank, 1, _Field)
            assert all(torch.equal(a, b) for a, b in zip(plain, virtual, strict=True)), (stage, prefetch, pace)


def test_gradients_inside_of_a_forward_find_every_unit_where_it_belongs() -> None:
    run_ranks(2, _inner_gradients)


def _second_copies(rank: int, world_size: int) -> None:
    mesh = Mesh.data_parallel(world_size, 2)
    for prefetch in (0, 1):
        recipe = replace(_recipe(3, accumulate=True, prefetch=prefetch), sharding=STAGES[3].with_second_copies(mesh))
        plain = _train(None, recipe, rank, 2, mesh=mesh)
        for pace, seed in _paces(rank, all_of_them=False):
            virtual = _train(VirtualStreams(Patience(), pace=pace, seed=seed), recipe, rank, 2, mesh=mesh)
            assert all(torch.equal(a, b) for a, b in zip(plain, virtual, strict=True)), (prefetch, pace)


def test_second_copies_of_parameters_are_made_and_read_in_order() -> None:
    run_ranks(4, _second_copies)


def _drop(waiter: Stream, awaited: Stream) -> Callable[[Stream, Event], bool]:
    return lambda stream, event: stream is waiter and event.stream is awaited


def _missing_wait(rank: int, world_size: int, waiter: Stream, awaited: Stream) -> str:
    streams = VirtualStreams(Patience(), pace=Pace.EAGER, drop_wait=_drop(waiter, awaited))
    with pytest.raises(HazardError) as caught:
        _train(streams, _recipe(3, accumulate=False), rank, 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("waiter", "awaited"),
    [
        (Stream.COMPUTE, Stream.GATHER),
        (Stream.GATHER, Stream.COMPUTE),
        (Stream.COMPUTE, Stream.REDUCE),
        (Stream.REDUCE, Stream.COMPUTE),
    ],
)
def test_a_planted_missing_wait_is_caught_though_the_order_was_harmless(waiter: Stream, awaited: Stream) -> None:
    for message in run_ranks(2, _missing_wait, waiter, awaited):
        assert "no event orders it" in message

"""The vertical schedule trains to the bits of the usual order, and moves each unit once per step and direction."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.plan.specs import blocks
from tests.support.cases import sample
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, live_bytes, sent
from tests.support.models import VOCABULARY, WIDTH, Block
from tests.support.offload import recipe
from tests.support.patience import Patience
from tests.support.sequence import (
    Steps,
    TiedModel,
    Way,
    batches,
    cross_entropy,
    sequence,
    sharded,
    tied_blocks,
    trained,
)
from tests.support.shared_memory import shared_files
from tests.support.training import assert_same
from zeroshard.engine.core.virtual_streams import Pace, VirtualStreams
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy, OnNonFinite
from zeroshard.plan.program import OpKind, build_programs
from zeroshard.plan.traffic import step_traffic
from zeroshard.sharding.units import find_units


def _alike(rank: int, usual: Way, upright: Way, what: str) -> None:
    wanted, found = trained(usual, rank), trained(upright, rank)
    assert found.losses == wanted.losses, what
    assert found.norms == pytest.approx(wanted.norms, rel=1e-12, nan_ok=True), what
    assert_same(found.parameters, wanted.parameters, what)


def _bits(rank: int, world: int) -> None:
    for stage in range(4):
        for micro in (1, 2, 4):
            way = Way(stage, micro)
            _alike(rank, way, way.upright, f"stage {stage}, {micro} micro-batches")
        low = Way(recipe(stage, "bf16"), 4)
        _alike(rank, low, low.upright, f"stage {stage} in bf16")


@pytest.mark.parametrize("world", sample([3, 1, 2], 3))
def test_bits_are_those_of_micro_batches_that_are_summed_before_their_reduce(world: int) -> None:
    run_ranks(world, _bits)


def test_one_rank_needs_no_no_sync_for_the_same_bits() -> None:
    run_ranks(1, _without_no_sync)


def _without_no_sync(rank: int, world: int) -> None:
    for stage in range(4):
        way = Way(stage, 4, no_sync=False)
        _alike(rank, way, way.upright, f"stage {stage}")


# Traffic and bytes.


def _calls(plan: Plan) -> int:
    """Units that a pass gathers."""
    return sum(unit.sharded for unit in plan.units)


def _traffic(rank: int, world: int) -> None:
    for stage in (1, 2, 3):
        for reuse in (True, False):
            policy = ExecutionPolicy(prefetch=2, reuse=reuse)
            way = Way(replace(recipe(stage), policy=policy), 4, vertical=True, clip=0.0)
            model, optimizer, _ = sharded(way)
            steps = Steps(way, model, None)
            for step in range(3):
                forget_sent(model)
                steps.run(batches(step, 4, rank))
                optimizer.step()
                optimizer.zero_grad()
            measured, plan = sent(model), zeroshard.plan_of(model)
            assert measured == step_traffic(plan, micro_batches=4), (stage, reuse)
            alone = zeroshard.build_plan(find_units(sequence()), replace(recipe(stage), policy=policy, moments=2), 2)
            assert measured == step_traffic(alone), "that of a step of one micro-batch"
            if stage == 3 and not reuse:
                root = 1  # gathered once for both passes
                assert measured.calls["all-gather"] == 2 * _calls(plan) - root
            assert measured.calls["reduce-scatter"] == len(plan.units), "each unit is reduced once"
            zeroshard.close(model)


def test_each_unit_is_gathered_once_per_direction_and_reduced_once_whatever_the_micro_batches() -> None:
    run_ranks(2, _traffic)


def _memory(rank: int, world: int) -> None:
    for stage in range(4):
        for param in (None, "bf16"):
            way = Way(recipe(stage, param), 4, vertical=True)
            gc.collect()
            gc.freeze()
            model, optimizer, _ = sharded(way)
            planned = replace(state_bytes(zeroshard.plan_of(model)), no_sync=0)
            assert held_bytes(model) == planned, (stage, param)
            assert live_bytes(planned.total) == planned.total, (stage, param)
            steps = Steps(way, model, None)
            for step in range(3):
                steps.run(batches(step, 4, rank))
                optimizer.step()
                optimizer.zero_grad()
            zeroshard.drain(model)
            planned = replace(state_bytes(zeroshard.plan_of(model)), no_sync=0)
            assert held_bytes(model) == planned, (stage, param, "after three steps")
            assert bool(planned.sum_slots) == (stage >= 2)
            # Divided gradients need no accumulators: those of one micro-batch are enough.
            accumulating = state_bytes(zeroshard.build_plan(*_arguments(way, accumulate=True)))
            assert planned.grad < accumulating.grad if stage >= 2 and param else planned.grad == accumulating.grad
            zeroshard.close(model)


def _arguments(way: Way, *, accumulate: bool) -> tuple[Any, Any, int]:
    assert not isinstance(way.plan, int)
    policy = replace(way.plan.policy, accumulate=accumulate)
    return find_units(sequence()), replace(way.plan, policy=policy), 2


def test_ranks_hold_the_bytes_of_the_plan_with_one_slot_for_sums() -> None:
    run_ranks(2, _memory)


def _uses(plan: Plan) -> Iterator[tuple[OpKind, int]]:
    programs = build_programs(plan)
    return ((op.kind, op.unit) for op in (*programs.forward, *programs.backward))


def test_the_lists_use_a_unit_for_each_micro_batch_and_gather_reduce_and_release_it_once() -> None:
    once = zeroshard.build_plan(blocks(3), recipe(3), 2)
    plan = zeroshard.build_plan(blocks(3), replace(recipe(3), policy=ExecutionPolicy(micro_batches=4)), 2)
    assert Plan.from_json(plan.to_json()) == plan
    counted = [list(_uses(one)) for one in (once, plan)]
    for kind in OpKind:
        for unit in range(1, 4):
            expected = counted[0].count((kind, unit)) * (4 if kind is OpKind.USE else 1)
            assert counted[1].count((kind, unit)) == expected, (kind, unit)


# What models do.


class _Called(TiedModel):
    """The same, its second block called twice, and its first again at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in _called_blocks(self):
            x = block(x)
        return x


def _called_blocks(model: nn.Module) -> list[Any]:
    assert isinstance(model, TiedModel)
    first, second, third = model.blocks
    return [model.embedding, first, second, second, third, first, model.head]


class _InPlace(nn.Sequential):
    """The same as a sequence of which two blocks begin with an in-place operation on what they are given."""

    def __init__(self) -> None:
        first, second = (nn.Sequential(nn.LeakyReLU(inplace=True), Block()) for _ in range(2))
        super().__init__(nn.Embedding(VOCABULARY, WIDTH), first, second, nn.Linear(WIDTH, VOCABULARY, bias=False))


def _in_place(rank: int, world: int) -> None:
    for stage in (0, 3):
        way = Way(stage, 3, build=_InPlace)
        _alike(rank, way, way.upright, f"stage {stage}")


def test_blocks_may_change_in_place_what_they_are_given() -> None:
    run_ranks(2, _in_place)


def _ties(rank: int, world: int) -> None:
    for stage in range(4):
        for build, calls in ((TiedModel, tied_blocks), (_Called, _called_blocks)):
            for plan in (stage, recipe(stage, "bf16")):
                way = Way(plan, 3, build=build, blocks=calls)
                _alike(rank, way, way.upright, f"{build.__name__} at stage {stage}, {plan}")


@pytest.mark.parametrize("world", sample([2, 1]))
def test_weights_that_several_blocks_read_get_the_bits_of_the_usual_order(world: int) -> None:
    run_ranks(world, _ties)


class _Dropping(nn.Module):
    """A block with dropout, computed again in the backward if it says so."""

    def __init__(self, again: bool | None) -> None:
        super().__init__()
        self.block, self.dropout, self._again = Block(), nn.Dropout(0.3), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._again is None:
            return self._inner(x)
        return checkpoint(self._inner, x, use_reentrant=self._again)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.block(x))


def _dropping(again: bool | None) -> nn.Sequential:
    model = sequence()
    for number in (1, 2, 3):
        model[number] = _Dropping(again)
    return model


def _random(rank: int, world: int) -> None:
    for stage in (1, 3):
        way = Way(stage, 3, vertical=True, seed=5 + rank, build=partial(_dropping, None))
        first = trained(way, rank)
        for again in (None, False, True):
            other = trained(replace(way, build=partial(_dropping, again)), rank)
            assert other.losses == first.losses, (stage, again)
            assert_same(other.parameters, first.parameters, f"stage {stage}, computed again: {again}")
        other = trained(replace(way, seed=50 + rank), rank)
        assert other.losses != first.losses, "masks come from the seed"
        assert len(set(first.losses)) == len(first.losses)


def test_dropout_is_drawn_from_the_seed_and_drawn_again_where_blocks_are_computed_again() -> None:
    run_ranks(2, _random)


class _Masks(nn.Module):
    """Multiplies by a mask that it draws, and keeps them all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.drawn: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn.append(torch.rand(WIDTH))
        return x * self.scale * self.drawn[-1]


def _draws(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), _Masks(), _Masks(), nn.Linear(WIDTH, VOCABULARY))
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=2)
    schedule = zeroshard.VerticalSchedule(model, cross_entropy)
    torch.manual_seed(1)
    schedule.step(batches(0, 2, rank))
    torch.manual_seed(1)
    drawn = [one for module in model if isinstance(module, _Masks) for one in module.drawn]
    assert all(torch.equal(one, torch.rand(WIDTH)) for one in drawn), (
        "block by block, in each the micro-batches in turn"
    )
    zeroshard.close(model)


def test_random_numbers_are_drawn_block_by_block() -> None:
    run_ranks(1, _draws)


def _checkpointed(rank: int, world: int) -> None:
    for stage in range(4):
        way = Way(stage, 3)
        for again in (False, True):
            build = partial(_again, again)
            _alike(rank, way, replace(way.upright, build=build), f"stage {stage}, reentrant: {again}")


def _again(reentrant: bool) -> nn.Sequential:
    model = sequence()
    for number in (1, 2, 3):
        model[number] = _Unnamed(model[number], reentrant)
    return model


class _Unnamed(Block):
    """A block with the names of its own parameters, computed again in the backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.load_state_dict(block.state_dict())
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self._reentrant)


def test_blocks_that_are_computed_again_give_the_same_bits() -> None:
    run_ranks(2, _checkpointed)


def _scaled(rank: int, world: int) -> None:
    for stage in (0, 2, 3):
        plan = recipe(stage, "fp16")
        plan = replace(plan, policy=replace(plan.policy, on_nonfinite=OnNonFinite.SKIP))
        for initial in (2.0**8, 2.0**19):
            scaler = partial(LossScaler, torch.device("cpu"), initial=initial)
            way = Way(plan, 3, scaler=scaler, steps=4)
            _alike(rank, way, way.upright, f"stage {stage}, scale {initial}")


def test_steps_in_float16_are_scaled_and_skipped_as_usual() -> None:
    run_ranks(2, _scaled)


def _streamed(rank: int, world: int) -> None:
    for stage in (1, 2, 3):
        for param in (None, "bf16"):
            plan = recipe(stage, param)
            plan = replace(plan, policy=replace(plan.policy, prefetch=stage % 3, overlap_step=True))
            way = Way(plan, 3, vertical=True)
            wanted = trained(way, rank)
            for pace, seed in ((Pace.LAZY, 0), (Pace.MIXED, rank), (Pace.EAGER, 0)):
                streams = partial(VirtualStreams, Patience(), pace=pace, seed=seed)
                found = trained(replace(way, streams=streams), rank)
                assert_same(found.parameters, wanted.parameters, f"stage {stage}, {param}, {pace}")


def test_every_order_that_the_events_allow_gives_the_same_bits() -> None:
    run_ranks(2, _streamed)


def _ragged(rank: int, world: int) -> None:
    for stage in (1, 3):
        way = Way(stage, 4, vertical=True)
        model, optimizer, _ = sharded(way)
        steps = Steps(way, model, None)
        for step, count in enumerate((4, 3, 1, 5)):
            forget_sent(model)
            losses = steps.run(batches(step, count, rank))
            with torch.no_grad():
                x, y = batches(step, count, rank)[0]
                assert float(cross_entropy(model(x), y)) == losses[0], "between the backward and the step, as before it"
            optimizer.step()
            optimizer.zero_grad()
        other = Way(stage, 1, vertical=False)
        plain, _, _ = sharded(other)
        x, y = batches(0, 1, rank)[0]
        cross_entropy(model(x), y).backward()  # the usual order still runs
        optimizer.step()
        for one in (model, plain):
            zeroshard.close(one)


def test_steps_may_have_other_numbers_of_micro_batches_and_the_usual_order_still_runs() -> None:
    run_ranks(2, _ragged)


# Copies between peers.


def _copied(rank: int, world: int, folder: str) -> None:
    for stage in (1, 2, 3):
        for param in (None, "bf16"):
            plan = replace(recipe(stage, param), peer_copies=True)
            where = (shared_files(f"{folder}/{stage}-{param}-{number}") for number in range(4))
            usual = Way(plan, 3)
            wanted = trained(replace(usual, shard={"peer_memory": next(where)}), rank)
            for pace in (None, Pace.LAZY, Pace.MIXED):
                streams = None if pace is None else partial(VirtualStreams, Patience(), pace=pace, seed=rank)
                copies = replace(usual.upright, streams=streams, shard={"peer_memory": next(where)})
                found = trained(copies, rank)
                if param is not None and stage > 1 and pace is None:
                    wanted = found  # what rests without accumulators is rounded to 16 bits, as with one micro-batch
                assert_same(found.parameters, wanted.parameters, f"stage {stage}, {param}, {pace}")


@pytest.mark.parametrize("world", sample([3, 2]))
def test_copies_between_peers_give_the_same_bits_in_every_order(world: int, tmp_path: Path) -> None:
    run_ranks(world, _copied, str(tmp_path))

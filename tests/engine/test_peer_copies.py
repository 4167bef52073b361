"""Copies between peers train to the same bits as collectives do, in every order that the events allow."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.patience import Patience
from tests.support.shared_memory import shared_files
from zeroshard.comm.collectives import Pending
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.core.streams import Buffers, Launch
from zeroshard.engine.core.virtual_streams import Pace, VirtualStreams
from zeroshard.errors import PlanError, UsageError
from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.legs import Stream
from zeroshard.plan.placement import STAGES
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.plan.traffic import step_traffic
from zeroshard.sharding.units import find_units


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.out = nn.Linear(12, 3)
        self.inp = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(_Block(12) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def _train(
    recipe: Recipe, rank: int, directory: str, *, micro_batches: str = "+", pace: Pace | None = None
) -> list[torch.Tensor]:
    """Four steps; of each micro-batch that is "-" the gradients stay local."""
    torch.manual_seed(0)
    model = _Model()
    streams = None if pace is None else VirtualStreams(Patience(), pace=pace, seed=rank)
    memory = shared_files(directory) if recipe.peer_copies else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zeroshard.shard(model, optimizer, plan=recipe, streams=streams, peer_memory=memory)
    for step in range(4):
        for micro, kind in enumerate(micro_batches):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            with zeroshard.no_sync(model) if kind == "-" else nullcontext():
                model(torch.randn(4, 6, generator=generator)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad(), zeroshard.GatheredParameters(model.inp.weight, modifier_rank=0):
                model.inp.weight.mul_(0.5 + rank)
        if step == 2:
            zeroshard.drain(model)  # a lazy stream sends late
            handle_of(model).comm.sent.reset_totals()
    if micro_batches == "+":
        zeroshard.drain(model)
        totals = {kind: nbytes for kind, (_, nbytes) in handle_of(model).comm.sent.totals().items()}
        assert totals == step_traffic(zeroshard.plan_of(model)).nbytes
    values = [value.clone() for _, value in zeroshard.iterate_full_parameters(model)]
    zeroshard.close(model)
    return values


def _recipe(stage: int, *, accumulate: bool, prefetch: int, low: bool, overlap: bool = False) -> Recipe:
    policy = ExecutionPolicy(
        overlap_step=overlap,
        prefetch=prefetch,
        accumulate=accumulate,
        clip_norm=0.5,
        cast_inputs="bf16" if low else None,
    )
    return Recipe(sharding=STAGES[stage], precision=Precision(param="bf16" if low else None), policy=policy)


def _same_bits(rank: int, world_size: int, directory: str, cases: list[tuple[int, bool, int, bool]]) -> int:
    compared = 0
    for number, (stage, accumulate, prefetch, low) in enumerate(cases):
        recipe = _recipe(stage, accumulate=accumulate, prefetch=prefetch, low=low)
        micro_batches = "+++" if accumulate else "+"
        expected = _train(recipe, rank, directory, micro_batches=micro_batches)
        for pace in (None, *Pace):
            where = f"{directory}/{number}-{pace}"
            got = _train(replace(recipe, peer_copies=True), rank, where, micro_batches=micro_batches, pace=pace)
            if low and accumulate and pace is None:
                expected = got  # the sum of the ranks isn't rounded before it is accumulated: better, not the same
            for one, other in zip(expected, got, strict=True):
                assert torch.equal(one, other), (stage, accumulate, prefetch, low, pace)
            compared += 1
    return compared


def test_training_gives_the_bits_of_collectives_at_every_stage_precision_and_pace(tmp_path: Path) -> None:
    cases = [(2, False, 1, False), (3, False, 1, False), (3, True, 2, False), (3, False, 0, True), (2, True, 1, True)]
    assert run_ranks(2, _same_bits, str(tmp_path), cases) == [20, 20]


def test_stage_1_gathers_by_copies(tmp_path: Path) -> None:
    assert run_ranks(2, _same_bits, str(tmp_path), [(1, False, 1, False), (1, True, 1, False)]) == [8, 8]


def _under_no_sync(rank: int, world_size: int, directory: str) -> None:
    for number, (stage, micro_batches) in enumerate([(2, "-+-"), (3, "-+-"), (2, "+-+-")]):
        recipe = _recipe(stage, accumulate=True, prefetch=1, low=False)
        expected = _train(recipe, rank, directory, micro_batches=micro_batches)
        for pace in (None, Pace.LAZY):
            where = f"{directory}/{number}-{pace}"
            got = _train(replace(recipe, peer_copies=True), rank, where, micro_batches=micro_batches, pace=pace)
            for one, other in zip(expected, got, strict=True):
                assert torch.equal(one, other), (stage, micro_batches, pace)


def test_gradients_kept_under_no_sync_are_sent_before_the_next_backward_writes_over_them(tmp_path: Path) -> None:
    run_ranks(2, _under_no_sync, str(tmp_path))


class _Nothing(nn.Module):
    """A unit whose parameters have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.nothing.sum()


def _nothing_to_send(rank: int, world_size: int, directory: str) -> None:
    for stage in (1, 2, 3):
        values = []
        for peers in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 12), _Nothing(), _Nothing(), nn.Linear(12, 3))
            optimizer = torch.optim.AdamW(model.parameters())
            recipe = replace(_recipe(stage, accumulate=False, prefetch=1, low=False), peer_copies=peers)
            memory = shared_files(f"{directory}/{stage}") if peers else None
            model, optimizer = zeroshard.shard(model, optimizer, plan=recipe, units=["1", "2"], peer_memory=memory)
            for _ in range(2):
                model(torch.full((4, 6), 1.0 + rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            values.append(torch.cat([value.flatten() for _, value in zeroshard.iterate_full_parameters(model)]))
            zeroshard.close(model)
        assert torch.equal(*values), stage


def test_units_without_elements_train_between_others(tmp_path: Path) -> None:
    run_ranks(2, _nothing_to_send, str(tmp_path))


def _norms(rank: int, world_size: int, directory: str) -> list[float]:
    """Of a step of a host that decides, with collectives and with copies, while new memory is full of NaN."""
    torch.use_deterministic_algorithms(True)  # which fills what torch.empty gives
    norms = []
    for peers in (False, True):
        torch.manual_seed(0)
        model = _Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = _recipe(3, accumulate=False, prefetch=1, low=False)
        recipe = replace(recipe, peer_copies=peers, transient_gradients=True)
        memory = shared_files(directory) if peers else None
        model, optimizer = zeroshard.shard(model, optimizer, plan=recipe, peer_memory=memory)
        model(torch.full((4, 6), 1.0 + rank)).square().mean().backward()
        optimizer.step()
        norms.append(zeroshard.get_global_grad_norm(model) or 0.0)
        zeroshard.close(model)
    return norms


def test_what_memory_held_between_gradients_is_not_in_their_norm(tmp_path: Path) -> None:
    for expected, got in run_ranks(2, _norms, str(tmp_path)):
        assert got == expected > 0


class _Slow(VirtualStreams):
    """Everything that the gather stream does takes a while."""

    def launch(self, stream: Stream, fn: Launch, reads: Buffers = (), writes: Buffers = ()) -> None:
        def late() -> Pending:
            time.sleep(0.01)
            return fn()

        super().launch(stream, late if stream is Stream.GATHER else fn, reads, writes)


def _changed_in_place(rank: int, world_size: int, directory: str, evaluate: bool) -> list[list[float]]:
    seen = []
    for overlap in (False, True):
        torch.manual_seed(0)
        model = _Model()
        streams = _Slow(Patience(), pace=Pace.LAZY) if rank == 1 else None
        memory = shared_files(f"{directory}/{overlap}")
        recipe = _recipe(2, accumulate=False, prefetch=1, low=False, overlap=overlap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = replace(recipe, peer_copies=True)
        model, optimizer = zeroshard.shard(model, optimizer, plan=recipe, streams=streams, peer_memory=memory)
        for _ in range(2):
            model(torch.full((4, 6), 1.0 + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluate:
                with torch.no_grad(), zeroshard.GatheredParameters(model, modifier_rank=0):
                    for parameter in model.parameters():
                        parameter.add_(1.0)
                with torch.no_grad():
                    model(torch.ones(1, 6))
            if overlap:
                zeroshard.drain(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            seen.append(torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist())
        zeroshard.close(model)
    return seen


def test_a_parameter_changed_in_place_after_a_step_is_not_changed_under_a_slower_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, _changed_in_place, str(tmp_path), False)
    assert first == second


def test_a_parameter_changed_in_place_after_an_evaluation_is_not_changed_under_a_slower_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, _changed_in_place, str(tmp_path), True)
    assert first == second


def _changed_in_use(rank: int, world_size: int, directory: str) -> None:
    for peers in (False, True):
        torch.manual_seed(0)
        model = _Model()
        recipe = replace(_recipe(3, accumulate=False, prefetch=1, low=False), peer_copies=peers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _ = zeroshard.shard(model, optimizer, plan=recipe, peer_memory=shared_files(f"{directory}/{peers}"))
        outer = [model.inp.weight, model.inp.bias, model.out.weight, model.out.bias]
        names = {"inp.weight", "inp.bias", "out.weight", "out.bias"}
        before = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}
        model(torch.ones(4, 6))  # leaves what is outside of the blocks in use, for a backward
        with pytest.raises(UsageError, match="without modifier_rank"), torch.no_grad():
            with zeroshard.GatheredParameters(outer):
                torch._foreach_mul_(outer, 0.5)
        for name, value in zeroshard.iterate_full_parameters(model):
            assert torch.equal(value, before[name]), (name, "a change that was refused was kept")
        with torch.no_grad(), zeroshard.GatheredParameters(outer, modifier_rank=0):
            torch._foreach_mul_(outer, 0.5 + rank)
        for name, value in zeroshard.iterate_full_parameters(model):
            assert torch.equal(value, before[name] * (0.5 if name in names else 1.0)), (name, peers)
        zeroshard.close(model)


def test_what_a_forward_left_in_use_can_be_changed_inside_gathered_parameters(tmp_path: Path) -> None:
    run_ranks(2, _changed_in_use, str(tmp_path))


def _several_ranks(rank: int, world_size: int, directory: str) -> list[list[float]]:
    stages = {}
    for stage in (2, 3):
        recipe = _recipe(stage, accumulate=False, prefetch=1, low=False)
        stages[stage] = _train(replace(recipe, peer_copies=True), rank, f"{directory}/{stage}")
    expected = _train(_recipe(3, accumulate=False, prefetch=1, low=False), rank, directory)
    for ours, other, collective in zip(stages[2], stages[3], expected, strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, collective, rtol=1e-5, atol=1e-6)  # gloo adds in another order
    return [value.flatten().tolist() for value in stages[3]]


@pytest.mark.parametrize("world", [3, 4])
def test_more_than_two_ranks_hold_the_same_parameters_near_those_of_collectives(tmp_path: Path, world: int) -> None:
    first, *others = run_ranks(world, _several_ranks, str(tmp_path))
    assert all(first == other for other in others)


def _used_in_place(rank: int, world_size: int, directory: str) -> tuple[int, int]:
    """Elements of this rank's shards that are used where they lie, and that gathers copy into slots."""
    torch.manual_seed(0)
    recipe = replace(_recipe(3, accumulate=False, prefetch=1, low=False), peer_copies=True)
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zeroshard.shard(model, optimizer, plan=recipe, peer_memory=shared_files(directory))
    runtime, used, copied = handle_of(model).runtime, 0, 0
    for unit in runtime.units:
        for group in unit.groups:
            group.whole.fill_(torch.nan)
        runtime.parameters.use(unit.index)
        for group in unit.groups:
            start, _ = group.plan.layout.shard_range(group.rank)
            for index, segment in enumerate(group.plan.layout.segments):
                place, parameter = group.whole[segment.offset : segment.end], group.parameters[index]
                if index in group.in_shard:
                    assert parameter.data_ptr() == group.shard[segment.offset - start :].data_ptr()
                    assert place.isnan().all(), "a gather copied what is there already"
                    used += segment.numel
                else:
                    assert torch.equal(parameter.flatten(), place)  # and so no NaN is left
            copied += sum(high - low for low, high in group.copied)
        runtime.parameters.release(unit.index)
    zeroshard.close(model)
    return used, copied


def test_parameters_within_this_ranks_shard_are_used_there_and_not_copied(tmp_path: Path) -> None:
    for used, copied in run_ranks(2, _used_in_place, str(tmp_path)):
        assert used > copied > 0


def test_a_plan_whose_gradients_no_peer_could_sum_is_refused() -> None:
    with pytest.raises(PlanError, match="stage 0"):
        build_plan(find_units(_Model(), None), Recipe(sharding=STAGES[0], peer_copies=True), 2)

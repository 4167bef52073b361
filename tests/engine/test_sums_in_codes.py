"""Gradients that are summed in codes (qgZ): what the sums are, what is sent, and what is left out and comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.models import Batch, Task, square_loss
from tests.support.patience import Patience
from tests.support.training import adamw, build, sgd
from tests.support.zoo import Stack
from zeroshard.config import load_config
from zeroshard.engine.core.virtual_streams import Pace, VirtualStreams
from zeroshard.engine.memory.block_codes import decode, decode_sum, encode
from zeroshard.errors import ConfigError, PlanError
from zeroshard.mesh import NESTED, REPLICATE, SHARD, Mesh
from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.hops import BETWEEN, WITHIN, Feedback, GradientCodes
from zeroshard.plan.legs import LegKind
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import GATHER_CODES, STAGES, Blocks
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy, OnNonFinite
from zeroshard.plan.traffic import step_traffic
from zeroshard.sharding.units import find_units

TASK = Task(Stack, square_loss)
CODES = GradientCodes()
Values = dict[str, torch.Tensor]


def _recipe(mesh: Mesh, stage: int, micro_batches: int = 1, **changes: Any) -> Recipe:
    row = STAGES[stage] if changes.pop("flat", False) else STAGES[stage].nested(mesh)
    policy = ExecutionPolicy(accumulate=micro_batches > 1, **changes.pop("policy", {}))
    return replace(Recipe(sharding=row, policy=policy, gradient_codes=CODES), **changes)


def _round(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    record = torch.zeros(blocks.code_nbytes(values.numel()) + blocks.scale_nbytes(values.numel()), dtype=torch.uint8)
    encode(values, record, blocks)
    found = torch.empty_like(values)
    decode(record, 1, found, blocks)
    return found


@pytest.mark.parametrize("blocks", [WITHIN, BETWEEN])
def test_a_code_is_within_half_a_step_of_its_value(blocks: Blocks) -> None:
    values = torch.randn(16, blocks.size, generator=torch.Generator().manual_seed(0)).mul_(10)
    values[3] = 0
    values[4] = 1e-42
    found = _round(values.view(-1), blocks).view(values.shape)
    step = values.abs().amax(dim=1, keepdim=True) / (2 ** (blocks.bits - 1) - 1)
    assert bool(((found - values).abs() <= step * 0.5001 + 2e-42).all())
    assert bool((found[3:5] == 0).all())
    for bad in (float("nan"), float("inf")):
        values[5, 7] = bad
        assert not bool(_round(values.view(-1), blocks).view(values.shape)[5, 7].isfinite())


def test_what_4_bits_leave_out_comes_with_the_next_sums_and_is_lost_without_error_feedback() -> None:
    """A gradient that is the same each time, of which one element in a block rounds all others to 0."""
    gradient = torch.full((BETWEEN.size,), 0.01)
    gradient[0] = 1.0
    record = torch.zeros(BETWEEN.code_nbytes(BETWEEN.size) + 4, dtype=torch.uint8)
    for feedback, expected in ((Feedback(), 1.0), (Feedback(beta=0.5), 1.0), (None, 0.0)):
        error = None if feedback is None else torch.zeros(BETWEEN.size, dtype=torch.bfloat16)
        total = torch.zeros(BETWEEN.size)
        for _ in range(100):
            encode(gradient, record, BETWEEN, error=error, feedback=feedback)
            decode_sum(record, 1, total, BETWEEN, add=True)
        assert abs(float(total[1:].mean()) - expected) < 0.15
        assert abs(float(total[0]) - 100) < 0.5


def _gradients(rank: int, plan: Plan) -> list[torch.Tensor]:
    """What autograd gives a rank in the first backward, in the layouts of the plan's trainable groups."""
    model = build(TASK)
    TASK.loss(model, Batch(0, 0, rank)).backward()
    named = dict(model.named_parameters())
    found: list[torch.Tensor] = []
    for _, group in plan.groups():
        flat = torch.zeros(group.layout.numel)
        for segment in group.layout.segments:
            gradient = named[segment.name].grad
            assert gradient is not None
            flat[segment.offset : segment.end] = gradient.reshape(-1)
        found.append(flat)
    return found


def _summed(plan: Plan, of_ranks: list[list[torch.Tensor]], number: int) -> torch.Tensor:
    """The sum of group `number` as the hops make it."""
    parts = [gradients[number] for gradients in of_ranks]
    group = list(plan.groups())[number][1]
    for hop in group.hops:
        rounded = [_round(part, hop.blocks) for part in parts]
        ranks = plan.mesh.size(hop.axes)
        parts = [sum(rounded[at : at + ranks][1:], rounded[at]) for at in range(0, len(parts), ranks)]
    return parts[0]


def _first_step(rank: int, world: int, subgroup: int, stage: int, changes: dict[str, Any]) -> None:
    mesh, model = Mesh.data_parallel(world, subgroup), build(TASK)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = zeroshard.shard(model, optimizer, plan=_recipe(mesh, stage, **changes), mesh=mesh)
    plan = zeroshard.plan_of(model)
    TASK.loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    after = dict(zeroshard.iterate_full_parameters(model))
    of_ranks = [_gradients(other, plan) for other in range(world)]
    for number, (_, group) in enumerate(plan.groups()):
        assert len(group.hops) == (1 if subgroup == world else 2)
        whole = _summed(plan, of_ranks, number)
        for segment in group.layout.segments:
            mean = whole[segment.offset : segment.end].view(segment.shape) / world
            torch.testing.assert_close(after[segment.name], before[segment.name] - mean, rtol=1e-6, atol=1e-6)
    zeroshard.close(model)


@pytest.mark.parametrize(
    ("world", "subgroup", "stage", "changes"),
    [(3, 3, 3, {}), (4, 2, 1, {}), (6, 2, 3, {}), (4, 2, 3, {"offload": Offload()})],
    ids=["one group", "stage 1, two hops", "3 nodes of 2", "state on the host"],
)
def test_sums_are_those_of_the_decoded_values_hop_after_hop(
    world: int, subgroup: int, stage: int, changes: dict[str, Any]
) -> None:
    run_ranks(world, _first_step, subgroup, stage, changes)


def _trained(
    rank: int, mesh: Mesh, recipe: Recipe, micro_batches: int, freeze: bool = False, pace: Pace | None = None
) -> Values:
    """The parameters after some steps, on a plan whose bytes and traffic are what was measured."""
    model = build(TASK)
    for parameter in list(model.parameters())[::2] if freeze else ():
        parameter.requires_grad_(False)
    streams = None if pace is None else VirtualStreams(Patience(), pace=pace, seed=rank)
    model, optimizer = zeroshard.shard(model, sgd(model), plan=recipe, mesh=mesh, streams=streams)
    for step in range(3):
        zeroshard.drain(model)
        forget_sent(model)
        for micro in range(micro_batches):
            (TASK.loss(model, Batch(step, micro, rank)) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = zeroshard.plan_of(model)
    assert sent(model) == step_traffic(plan, micro_batches=micro_batches)
    assert held_bytes(model).total == state_bytes(plan).total
    found = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}
    zeroshard.close(model)
    return found


_CASES: dict[int, list[tuple[int, int, int, dict[str, Any]]]] = {
    4: [
        (2, 3, 2, {"freeze": True, "codes": GATHER_CODES, "frozen_codes": GATHER_CODES}),
        (2, 2, 2, {"offload": Offload()}),
        (2, 3, 1, {"offload": Offload(param=True), "persistence_threshold": 40}),
        (2, 1, 2, {}),
    ],
    5: [(5, 3, 2, {})],
}


def _near_exact(rank: int, world: int) -> None:
    for subgroup, stage, micro_batches, changes in _CASES[world]:
        freeze, mesh = changes.pop("freeze", False), Mesh.data_parallel(world, subgroup)
        recipe = _recipe(mesh, stage, micro_batches, **changes)
        exact = replace(recipe, sharding=STAGES[stage], gradient_codes=None, codes=None)
        expected = _trained(rank, Mesh.data_parallel(world), exact, micro_batches, freeze)
        found = _trained(rank, mesh, recipe, micro_batches, freeze)
        started = {name: value.detach() for name, value in build(TASK).named_parameters()}
        moved = max(float((expected[name] - value).abs().max()) for name, value in started.items())
        for name, value in expected.items():
            assert float((found[name] - value).abs().max()) < 0.1 * moved, (name, subgroup, stage, changes)


@pytest.mark.parametrize("world", list(_CASES))
def test_steps_are_near_those_of_exact_sums_and_send_what_the_plan_says(world: int) -> None:
    run_ranks(world, _near_exact)


def _in_every_order(rank: int, world: int) -> None:
    mesh = Mesh.data_parallel(world, 2)
    for stage, micro_batches in ((3, 2), (1, 1)):
        recipe = _recipe(mesh, stage, micro_batches, policy={"prefetch": 1, "overlap_step": True})
        plain = _trained(rank, mesh, recipe, micro_batches)
        for pace in (Pace.LAZY, Pace.MIXED):
            for name, value in _trained(rank, mesh, recipe, micro_batches, pace=pace).items():
                assert torch.equal(value, plain[name])


def test_every_order_that_the_events_allow_gives_the_same_bits() -> None:
    run_ranks(4, _in_every_order)


def _bad_gradients(rank: int, world: int) -> None:
    mesh = Mesh.data_parallel(world, 2)
    recipe = _recipe(mesh, 3, policy={"on_nonfinite": OnNonFinite.SKIP})
    model = build(TASK)
    model, optimizer = zeroshard.shard(model, adamw(model), plan=recipe, mesh=mesh)
    for step in range(3):
        before = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}
        scale = float("inf") if step == 1 and rank == 1 else 1.0
        (TASK.loss(model, Batch(step, 0, rank)) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = dict(zeroshard.iterate_full_parameters(model))
        assert all(bool(value.isfinite().all()) for value in after.values())
        assert all(torch.equal(value, before[name]) for name, value in after.items()) == (step == 1)
    zeroshard.close(model)


def test_a_step_with_inf_on_one_rank_is_skipped_and_leaves_nothing_behind() -> None:
    run_ranks(4, _bad_gradients)


class _OneLarge(nn.Module):
    """Its gradients are 1 for one element, and so small for the others of the block that 4 bits round them to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(BETWEEN.size))

    def forward(self) -> torch.Tensor:
        return self.values[0] + self.values[1:].sum() * 3 / 127


def _moved(rank: int, world: int) -> None:
    mesh = Mesh.data_parallel(world, 2)
    for feedback, expected in ((Feedback(), 3 / 127), (None, 0.0)):
        model, codes = _OneLarge(), GradientCodes(feedback=feedback)
        optimizer = torch.optim.SGD(model.parameters(), lr=1 / 60)
        recipe = _recipe(mesh, 3, gradient_codes=codes)
        model, optimizer = zeroshard.shard(model, optimizer, plan=recipe, mesh=mesh)
        for _ in range(60):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = dict(zeroshard.iterate_full_parameters(model))["values"]
        assert abs(float(found[1:].mean()) + expected) < 0.2 * 3 / 127
        assert abs(float(found[0]) + 1) < 0.01
        zeroshard.close(model)


def test_what_is_small_beside_its_block_is_trained_by_error_feedback_alone() -> None:
    run_ranks(4, _moved)


def test_only_4_bits_of_a_subgroups_sum_leave_it() -> None:
    mesh = Mesh.data_parallel(8, 4)
    recipe = _recipe(mesh, 3, precision=Precision(param="bf16"))
    plan = build_plan(find_units(build(TASK)), recipe, mesh)
    for (_, group), legs in zip(plan.groups(), (legs for unit in plan.legs for legs in unit), strict=True):
        sending = {leg.axes: leg.nbytes for leg in legs.reduce if leg.axes}
        whole, part = group.layout.numel, group.layout.numel // 4
        assert sending == {(SHARD,): whole + whole // 256 * 4, (REPLICATE,): part // 2 + part // 128 * 4}
        kinds = [leg.kind for leg in legs.reduce]
        assert kinds == [LegKind.COLLECT, *[LegKind.ENCODE, LegKind.ALL_TO_ALL, LegKind.SUM] * 2]


CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.05}}}


def _config(stage: int, **zero: Any) -> dict[str, Any]:
    section = {"stage": stage, "stage3_param_persistence_threshold": 0, "zero_quantized_gradients": True, **zero}
    return {**CONFIG, "zero_optimization": section}


def _from_config(rank: int, world: int, folder: str) -> None:
    def made(zero: dict[str, Any], stage: int = 3) -> zeroshard.Engine:
        return zeroshard.initialize(model=build(TASK), config=_config(stage, **zero))[0]

    def trained(engine: zeroshard.Engine, first: int) -> Values:
        for step in range(first, first + 2):
            engine.backward(TASK.loss(engine, Batch(step, 0, rank)))
            engine.step()
        return {name: value.clone() for name, value in zeroshard.iterate_full_parameters(engine.module)}

    loco = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 3}}
    for stage, zero, hops in (
        (1, {}, [None]),
        (2, loco, [Feedback(0.8, 3)]),
        (2, {"zero_hpz_partition_size": 2}, [None, Feedback()]),
        (3, {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, **loco}, [None, Feedback(0.8, 3)]),
    ):
        engine = made(zero, stage)
        trained(engine, 0)
        for unit, group in engine.plan.groups():
            assert [hop.feedback for hop in group.hops] == hops
            assert unit.axes == NESTED if "zero_hpz_partition_size" in zero else unit.axes
        engine.destroy()
    engine = made({"zero_hpz_partition_size": 2})
    trained(engine, 0)
    engine.save_checkpoint(folder)
    trained(engine, 2)
    engine.load_checkpoint(folder)  # what codes have left out since belongs to no step of the checkpoint
    expected = trained(engine, 2)
    engine.destroy()
    other = made({"zero_hpz_partition_size": 2})
    other.load_checkpoint(folder)
    for name, value in trained(other, 2).items():
        assert torch.equal(value, expected[name])
    other.destroy()


def test_the_config_asks_for_sums_in_codes_and_goes_on_from_checkpoints(tmp_path: Path) -> None:
    run_ranks(4, _from_config, str(tmp_path))


@pytest.mark.parametrize(
    ("stage", "zero", "said"),
    [
        (0, {}, "at stage 0 every rank keeps all gradients"),
        (3, {"mics_shard_size": 2}, "sums over copies are exact"),
        (2, {"zero_quantized_gradients": False, "zero_hpz_partition_size": 2}, "needs zero_quantized_gradients"),
        (3, {"zeropp_loco_param": {"err_beta": 1.0}}, "less than 1|below 1"),
    ],
)
def test_what_can_t_be_summed_in_codes_is_refused_by_name(stage: int, zero: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(_config(stage, **zero), world_size=4)


def test_plans_that_can_t_be_are_refused() -> None:
    units, mesh = find_units(build(TASK)), Mesh.data_parallel(4, 2)
    with pytest.raises(PlanError, match="float64"):
        build_plan(find_units(build(TASK).double()), _recipe(mesh, 3), mesh)
    with pytest.raises(PlanError, match="MiCS"):
        build_plan(units, _recipe(mesh, 3, flat=True, sharding=STAGES[3].on(mesh)), mesh)
    with pytest.raises(PlanError, match="1-bit"):
        build_plan(units, _recipe(mesh, 1, compressed=True), mesh)
    plan = build_plan(units, _recipe(mesh, 3), mesh)
    unit = plan.units[1]
    turned = replace(unit.groups[0], hops=unit.groups[0].hops[::-1])
    with pytest.raises(PlanError, match="hops must go over"):
        replace(plan, units=(plan.units[0], replace(unit, groups=(turned,)), *plan.units[2:]))
    assert Plan.from_json(plan.to_json()) == plan

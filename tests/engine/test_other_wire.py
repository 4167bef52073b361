"""A wire is the size of its codes and two functions: one of bfloat16, in a file of the tests, trains as planned."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.support.bf16_wire import Bf16Blocks, bf16_wire
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.models import Batch, Task, square_loss
from tests.support.training import adamw, assert_same, build, full_parameters
from tests.support.zoo import Stack
from zeroshard.mesh import Mesh
from zeroshard.plan.builder import Recipe, build_plan
from zeroshard.plan.legs import LegKind
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import Plan
from zeroshard.plan.traffic import step_traffic
from zeroshard.sharding.units import find_units

TASK = Task(Stack, square_loss)
STEPS = 3


def _plan(world: int, *, rounded: bool) -> Plan:
    recipe = Recipe(sharding=STAGES[3], codes=Bf16Blocks() if rounded else None)
    return build_plan(find_units(build(TASK)), recipe, Mesh.data_parallel(world))


def _reference(rank: int, world: int) -> nn.Module:
    """Trained without zeroshard: float32 parameters, of which forward and backward see the bfloat16 values."""
    exact, seen = build(TASK), build(TASK)
    optimizer = adamw(exact)
    for step in range(STEPS):
        with torch.no_grad():
            for value, source in zip(seen.parameters(), exact.parameters(), strict=True):
                value.copy_(source.bfloat16())
        TASK.loss(seen, Batch(step, 0, rank)).backward()
        for value, target in zip(seen.parameters(), exact.parameters(), strict=True):
            assert value.grad is not None
            dist.all_reduce(value.grad)
            target.grad, value.grad = value.grad / world, None
        optimizer.step()
    return exact


def _trained(rank: int, world: int) -> None:
    expected = dict(_reference(rank, world).named_parameters())
    plan, model = _plan(world, rounded=True), build(TASK)
    assert all(group.codes is not None for _, group in plan.groups())
    with bf16_wire():
        model, optimizer = zeroshard.shard(model, adamw(model), plan=plan, accumulate=None)
        assert optimizer is not None
        for step in range(STEPS):
            forget_sent(model)
            TASK.loss(model, Batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert sent(model) == step_traffic(plan)
        assert held_bytes(model).total == state_bytes(plan).total
        assert_same(full_parameters(model), {name: value.detach() for name, value in expected.items()})
        zeroshard.close(model)


def test_a_wire_of_bfloat16_trains_to_the_bits_of_rounded_parameters_and_sends_and_holds_what_the_plan_says() -> None:
    run_ranks(2, _trained)


def test_its_gathers_send_half_of_what_float32_sends() -> None:
    rounded, plain = (step_traffic(_plan(2, rounded=rounded)) for rounded in (True, False))
    gather, reduce = LegKind.ALL_GATHER.value, LegKind.REDUCE_SCATTER.value
    assert (rounded.calls, rounded.nbytes[reduce]) == (plain.calls, plain.nbytes[reduce])
    assert 2 * rounded.nbytes[gather] == plain.nbytes[gather]

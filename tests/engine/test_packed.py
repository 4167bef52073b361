"""Frozen parameters of packed or whole numbers are sharded, gathered, offloaded and saved byte for byte (QLoRA)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.models import Batch
from tests.support.packed import Codes, PackedStack, packed_task
from tests.support.training import adamw, build
from zeroshard.errors import PlanError, UsageError
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import GATHER_CODES, STAGES
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.plan.traffic import step_traffic

STEPS = 3
Values = dict[str, torch.Tensor]


def _bytes(values: Values) -> Values:
    packed = (name for name in values if name.startswith("blocks.") and name.endswith(".weight"))
    return {name: values[name].view(torch.uint8) for name in packed}


def _plain(world: int, storage: torch.dtype) -> tuple[Values, list[float]]:
    """Trained parameters, and losses of rank 0, of one process that sees all batches."""
    task = packed_task(storage)
    model = build(task)
    optimizer = adamw(model)
    losses: list[float] = []
    for step in range(STEPS):
        found = [task.loss(model, Batch(step, 0, rank)) for rank in range(world)]
        torch.stack(found).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found[0].detach()))
    return {name: value.detach().clone() for name, value in model.named_parameters()}, losses


def _step(model: nn.Module, optimizer: Any, storage: torch.dtype, rank: int, step: int) -> float:
    loss = packed_task(storage).loss(model, Batch(step, 0, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _train(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        _step(model, optimizer, torch.uint8, rank, step)


def _whole(model: nn.Module) -> Values:
    return {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}


def _recipe(stage: int, **changes: Any) -> Recipe:
    return Recipe(sharding=STAGES[stage], policy=ExecutionPolicy(clip_norm=0.5), **changes)


def _trains(rank: int, world: int, storage: torch.dtype) -> None:
    expected, losses = _plain(world, storage)
    ways = [_recipe(stage) for stage in range(4)]
    ways += [_recipe(3, offload=Offload(param=True)), _recipe(3, frozen_codes=GATHER_CODES)]
    for recipe in ways:
        model = build(packed_task(storage))
        model, optimizer = zeroshard.shard(model, adamw(model), plan=recipe)
        for step in range(STEPS):
            zeroshard.drain(model)
            forget_sent(model)
            assert _step(model, optimizer, storage, rank, step) == pytest.approx(losses[step], rel=1e-6) or rank
        plan = zeroshard.plan_of(model)
        assert sent(model) == step_traffic(plan)
        assert held_bytes(model).total == state_bytes(plan).total
        found = _whole(model)
        assert all(torch.equal(_bytes(found)[name], value) for name, value in _bytes(expected).items())
        for name in expected.keys() - _bytes(expected).keys():
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
        zeroshard.close(model)
        assert all(isinstance(block.weight, Codes) for block in model.blocks)  # pyright: ignore[reportGeneralTypeIssues]


@pytest.mark.parametrize("storage", [torch.uint8, torch.float16, torch.int32])
def test_a_model_with_packed_weights_trains_as_in_one_process(storage: torch.dtype) -> None:
    run_ranks(2, _trains, storage)


def _keeps_bits(rank: int, world: int) -> None:
    for storage in (torch.float16, torch.float32, torch.uint8):
        model = build(packed_task(storage))
        before = _bytes({name: value.detach().clone() for name, value in model.named_parameters()})
        policy = ExecutionPolicy(cast_inputs="bf16")
        recipe = Recipe(sharding=STAGES[3], precision=Precision(param="bf16"), policy=policy)
        model, optimizer = zeroshard.shard(model, adamw(model), plan=recipe)
        _step(model, optimizer, storage, rank, 0)
        dtypes = {group.param.dtype for _, group in zeroshard.plan_of(model).groups() if not group.trainable}
        assert dtypes == {str(storage).removeprefix("torch.")}
        after = _bytes(_whole(model))
        assert all(torch.equal(after[name], value) for name, value in before.items())
        zeroshard.close(model)


def test_a_compute_dtype_leaves_packed_numbers_alone_whatever_their_storage_is() -> None:
    run_ranks(2, _keeps_bits)


class _Own(nn.Parameter):
    """A class that says nothing of its memory."""


def _refuses_to_guess(rank: int, world: int) -> None:
    for dtype, param in ((torch.bfloat16, "bf16"), (torch.float32, None), (torch.float32, "bf16")):
        model = nn.Linear(4, 4)
        frozen = torch.Tensor._make_subclass(_Own, torch.ones(4, 4, dtype=dtype), False)
        model.weight = frozen  # pyright: ignore[reportAttributeAccessIssue]
        recipe = Recipe(sharding=STAGES[3], precision=Precision(param=param))
        if (dtype, param) == (torch.float32, "bf16"):
            with pytest.raises(PlanError, match=r"'weight' is frozen, of class _Own and in float32"):
                zeroshard.shard(model, torch.optim.SGD([model.bias]), plan=recipe)
            continue
        zeroshard.shard(model, torch.optim.SGD([model.bias]), plan=recipe)
        assert _whole(model)["weight"].dtype is dtype
        zeroshard.close(model)


def test_a_class_that_does_not_say_whether_it_holds_plain_numbers_is_not_cast_but_refused() -> None:
    run_ranks(2, _refuses_to_guess)


def _same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _saved(rank: int, world: int, folder: Path) -> None:
    model = build(packed_task(torch.uint8))
    model, optimizer = zeroshard.shard(model, adamw(model), plan=3)
    _step(model, optimizer, torch.uint8, rank, 0)
    zeroshard.save(model, folder, "packed")
    expected = _whole(model)
    _step(model, optimizer, torch.uint8, rank, 1)
    goes_on = _whole(model)
    zeroshard.close(model)
    for stage in (1, 3):
        other = build(packed_task(torch.uint8))
        with torch.no_grad():
            for block in other.blocks:  # pyright: ignore[reportGeneralTypeIssues]
                block.weight.zero_()
        other, optimizer = zeroshard.shard(other, adamw(other), plan=stage)
        zeroshard.load(other, folder, "packed")
        assert _same(_whole(other), expected)
        _step(other, optimizer, torch.uint8, rank, 1)
        assert _same(_whole(other), goes_on)
        zeroshard.close(other)


def test_checkpoints_hold_packed_numbers_and_load_at_another_stage(tmp_path: Path) -> None:
    run_ranks(2, _saved, tmp_path / "saved")


class _Replacing(nn.Module):
    """Gives a parameter other data in its forward, as bitsandbytes' 8-bit layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = PackedStack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        weight = self.inner.blocks[0].weight
        assert isinstance(weight, torch.Tensor)
        weight.data = torch.ones(weight.shape, dtype=torch.uint8)
        return out


def _replaced(rank: int, world: int) -> None:
    for stage in (1, 3):
        model = _Replacing()
        model, optimizer = zeroshard.shard(model, adamw(model), plan=stage)
        said = r"blocks.0.weight' holds packed numbers, and its module gave it other data"
        with pytest.raises(UsageError, match=said):
            _train(model, optimizer, rank)


def test_packed_numbers_that_a_forward_replaces_are_refused_by_name() -> None:
    run_ranks(1, _replaced)

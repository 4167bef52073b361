"""A unit is in one state, the states change as the table says, and each of them is come to."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, Task, square_loss
from tests.support.training import Setting, shard_task
from tests.support.zoo import Stack
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.memory.unit import CHANGES, GradientState, Unit, UnitState
from zeroshard.plan.program import OpKind

TASK = Task(Stack, square_loss)


def _watch(seen: dict[str, list[UnitState]], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Unit.become

    def become(unit: Unit, state: UnitState) -> None:
        if state is not unit.state:
            seen[unit.label].append(state)
        plain(unit, state)

    monkeypatch.setattr(Unit, "become", become)


def _walks(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        model, optimizer = shard_task(TASK, Setting())
        runtime = handle_of(model).runtime
        assert all(unit.state is UnitState.RESTING for unit in runtime.units if unit.plan.sharded)
        seen: dict[str, list[UnitState]] = defaultdict(list)
        _watch(seen, monkeypatch)
        loss = TASK.loss(model, Batch(0, 0, rank))
        loss.backward()
        first = next(unit for unit in runtime.units if unit.plan.name and unit.plan.sharded)
        use = [UnitState.GATHERING, UnitState.GATHERED, UnitState.IN_USE]
        assert seen[first.label][:4] == [*use, UnitState.GATHERED]
        assert seen[first.label][-3:] == [UnitState.IN_USE, UnitState.PENDING, UnitState.GATHERED]
        assert all(unit.gradients is GradientState.REDUCED for unit in runtime.units if unit.trainable)
        optimizer.step()
        assert all(unit.gradients is GradientState.NONE for unit in runtime.units)
        zeroshard.drain(model)
        gathered = {op.unit for op in runtime._programs.after_step if op.kind is OpKind.GATHER}
        for unit in runtime.units:
            if unit.plan.sharded:
                assert unit.state is (UnitState.GATHERED if unit.index in gathered else UnitState.RESTING), unit.label


def test_a_step_takes_a_unit_through_its_states_and_leaves_it_as_the_program_says() -> None:
    run_ranks(2, _walks)


def _accumulates(rank: int, world: int) -> None:
    model, _ = shard_task(TASK, Setting(micro=3))
    units = [unit for unit in handle_of(model).runtime.units if unit.trainable]
    found: list[set[GradientState]] = []
    for micro, reduces in enumerate((True, False, True)):
        loss = TASK.loss(model, Batch(0, micro, rank)) / 3
        if reduces:
            loss.backward()
        else:
            with zeroshard.no_sync(model):
                loss.backward()
        found.append({unit.gradients for unit in units})
    assert found == [{GradientState.REDUCED}, {GradientState.BOTH}, {GradientState.REDUCED}]


def test_local_gradients_may_wait_beside_reduced_ones() -> None:
    run_ranks(2, _accumulates)


def _interrupted(rank: int, world: int) -> None:
    model, optimizer = shard_task(TASK, Setting())
    units = handle_of(model).runtime.units
    loss = TASK.loss(model, Batch(0, 0, rank))

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("in the middle")

    first = next(module for name, module in model.named_modules() if name == units[1].plan.name)
    first.register_full_backward_hook(lambda *_: fail(loss))
    loss = TASK.loss(model, Batch(0, 0, rank))
    with pytest.raises(RuntimeError, match="in the middle"):
        loss.backward()
    first._backward_hooks.clear()
    TASK.loss(model, Batch(0, 0, rank)).backward()
    assert not any(unit.state is UnitState.PENDING for unit in units)
    optimizer.step()


def test_no_unit_stays_pending_after_a_backward_that_failed() -> None:
    run_ranks(2, _interrupted)


def test_every_state_is_left_and_come_to() -> None:
    assert set(CHANGES) == set(UnitState)
    assert set().union(*CHANGES.values()) == set(UnitState)


def test_a_change_that_is_not_in_the_table_is_an_error_of_ours() -> None:
    unit = Unit.__new__(Unit)
    unit.state = UnitState.RESTING
    unit.plan = type("Plan", (), {"label": "0"})()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AssertionError, match="RESTING to UnitState"):
        unit.become(UnitState.IN_USE)

"""1-bit optimizers equal a plain simulation of all ranks, bit by bit of what is sent, at stages 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.support.cases import sample
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.models import WIDTH, Batch
from tests.support.onebit import (
    ADAM,
    BOUNDS,
    FREEZE,
    LAMB,
    Simulation,
    ZeroOneSimulation,
    frozen_model,
    groups_of,
    skipping_loss,
)
from tests.support.training import assert_close, assert_same, full_parameters
from zeroshard.engine.engine import Engine
from zeroshard.errors import CheckpointError, PlanError, UsageError
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.onebit.mean import pack, unpack
from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy, OnNonFinite
from zeroshard.plan.traffic import step_traffic
from zeroshard.sharding.units import find_units

STEPS = 7
MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "OneBitAdam": lambda model: zeroshard.OneBitAdam(groups_of(model), freeze_step=FREEZE, **ADAM),
    "OneBitLamb": lambda model: zeroshard.OneBitLamb(groups_of(model), freeze_step=FREEZE, **LAMB, **BOUNDS),
}


POLICIES: dict[str, dict[str, int]] = {
    "local": {"var_freeze_step": 5, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4},
    "talking": {"var_freeze_step": 5, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 1},
}
VARIANCE = (1, 2, 4)
"""Steps, from 1, of a freeze at 5 with an update scaler of 2: each until two are done, then every second."""
TALKS = (6, 7, 8, 12)
"""The same of talking: at most every fourth step, counted from the first."""


def _zero_one(rank: int, world: int) -> None:
    for name, stage in (("local", 0), ("talking", 0), ("talking", 1)):
        model = frozen_model()
        policy = POLICIES[name]
        _, optimizer = zeroshard.shard(model, zeroshard.ZeroOneAdam(groups_of(model), **ADAM, **policy), plan=stage)
        simulation = ZeroOneSimulation(zeroshard.plan_of(model), world, policy)
        for step in range(1, 13):
            forget_sent(model)
            skipping_loss(model, Batch(step - 1, 0, rank)).backward()
            optimizer.step()
            if step not in (1, policy["var_freeze_step"]):
                local = name == "local" and step > 5 and step not in TALKS
                compressed = step not in VARIANCE and not local
                expected = step_traffic(zeroshard.plan_of(model), compressed=compressed, local=local)
                assert sent(model) == expected, (name, stage, step)
            simulation.step(step - 1)
            wanted = {key: value.detach() for key, value in simulation.models[rank].named_parameters()}
            assert_close(full_parameters(model), wanted, 2e-6, f"{name}, stage {stage}, step {step}")
            assert held_bytes(model) == replace(state_bytes(zeroshard.plan_of(model)), no_sync=0), (name, stage)
            if name == "talking" or step <= 5 or step in TALKS:
                same = [simulation.flat(r, key) for key in simulation.parameters for r in range(world)]
                assert all(torch.equal(a, b) for a, b in zip(same[::world], same[world - 1 :: world], strict=True))
        zeroshard.close(model)
    if world > 1:
        model = frozen_model()
        with pytest.raises(PlanError, match="use stage 0, or set local_step_clipper to 1"):
            zeroshard.shard(model, zeroshard.ZeroOneAdam(model.parameters()), plan=1)


def test_zero_one_adam_equals_a_simulation_and_talks_as_often_as_it_should() -> None:
    run_ranks(2, _zero_one)


def _equal(rank: int, world: int) -> None:
    for name, make in MAKERS.items():
        for stage in (0, 1):
            model = frozen_model()
            _, optimizer = zeroshard.shard(model, make(model), plan=stage)
            simulation = Simulation(zeroshard.plan_of(model), world, name == "OneBitLamb")
            for step in range(STEPS):
                skipping_loss(model, Batch(step, 0, rank)).backward()
                optimizer.step()
                simulation.step(step)
                expected = {key: value.detach() for key, value in simulation.model.named_parameters()}
                assert_close(full_parameters(model), expected, 2e-6, f"{name}, stage {stage}, step {step}")
                assert (zeroshard.get_global_grad_norm(model) is None) == (step >= FREEZE)
            zeroshard.close(model)


@pytest.mark.parametrize("world", sample([3, 2]))
def test_each_equals_a_simulation_of_all_ranks(world: int) -> None:
    run_ranks(world, _equal)


def _counted(rank: int, world: int) -> tuple[int, int]:
    found = (0, 0)
    for name, make in MAKERS.items():
        for stage in (0, 1):
            for accumulate in (False, True):
                model = frozen_model()
                _, optimizer = zeroshard.shard(model, make(model), plan=stage, accumulate=accumulate)
                for step in range(STEPS):
                    forget_sent(model)
                    for micro in range(2 if accumulate else 1):
                        (model(Batch(step, micro, rank).normal(3, WIDTH)).square().mean()).backward()
                    optimizer.step()
                    plan, late = zeroshard.plan_of(model), step >= FREEZE
                    if step not in (
                        0,
                        FREEZE - 1,
                    ):  # the order is agreed upon in one, the momentum gathered in the other
                        expected = step_traffic(plan, micro_batches=2 if accumulate else 1, compressed=late)
                        assert sent(model) == expected, (name, stage, accumulate, step)
                        assert ("reduce-scatter" in expected.nbytes) == (not late)
                        found = (expected.nbytes["all-to-all"], plan.parameter_numel) if late else found
                assert held_bytes(model) == replace(state_bytes(plan), no_sync=0), (name, stage)
                assert Plan.from_json(plan.to_json()) == plan
                zeroshard.close(model)
    return found


def test_one_bit_per_parameter_is_sent_and_what_is_held_is_in_the_plan() -> None:
    nbytes, parameters = run_ranks(2, _counted)[0]
    assert nbytes < parameters / 8 * 1.6, "bits, scales and padding of a model of tiny matrices"


def test_bits_are_packed_eight_to_a_byte() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    values[5] = 0.0
    packed = pack(values)
    assert (packed.dtype, packed.numel()) == (torch.uint8, 512)
    assert torch.equal(unpack(packed), torch.where(values >= 0, 1.0, -1.0))


def _skips_and_resumes(rank: int, world: int, folder: str) -> None:
    for name, make in MAKERS.items():
        for stage in (0, 1):
            ends: list[dict[str, torch.Tensor]] = []
            for steps in (range(STEPS), (0, 1, -1, 2, 3, -1, -1, 4, 5, 6)):
                model = frozen_model()
                policy = ExecutionPolicy(on_nonfinite=OnNonFinite.SKIP, cast_inputs="float16")
                recipe = Recipe(STAGES[stage], precision=Precision("float16"), policy=policy)
                scaler = LossScaler("cpu", dynamic=False, initial=64.0)
                _, optimizer = zeroshard.shard(model, make(model), plan=recipe, scaler=scaler)
                for step in steps:
                    loss = skipping_loss(model, Batch(abs(step), 0, rank)) * float(scaler.scale)
                    (loss * math.inf if step < 0 and rank == 1 else loss).backward()
                    optimizer.step()
                ends.append(full_parameters(model))
                zeroshard.close(model)
            assert_same(ends[1], ends[0], f"{name}: a skipped step leaves no trace")
    for name in CONFIGURED:
        _resumes(rank, name, folder)


CONFIGURED: dict[str, tuple[str, int, dict[str, int]]] = {
    "OneBitAdam": ("OneBitAdam", 1, {"freeze_step": FREEZE}),
    "OneBitLamb": ("OneBitLamb", 1, {"freeze_step": FREEZE}),
    "talking": ("ZeroOneAdam", 1, {"var_freeze_step": FREEZE, "local_step_scaler": 1, "local_step_clipper": 1}),
    "local": ("ZeroOneAdam", 0, {"var_freeze_step": FREEZE, "local_step_scaler": 1, "local_step_clipper": 4}),
}
"""Type, stage and parameters. The ranks of "local" talk in steps 4, 8 and 12, counted from 1."""


def _resumes(rank: int, name: str, folder: str) -> None:
    """Saved in the warm-up or after it, training goes on as if nothing had happened."""
    ends: list[dict[str, torch.Tensor]] = []
    for saves in ((), (1, 3, FREEZE + 1, FREEZE + 2)):
        engine = _engine(name)
        for step in range(STEPS + 5):
            engine.backward(skipping_loss(engine, Batch(step, 0, rank)))
            engine.step()
            if step in saves:
                engine.save_checkpoint(folder, tag=f"{name}{step}")
                engine.destroy()
                engine = _engine(name)
                engine.load_checkpoint(folder, tag=f"{name}{step}")
        assert engine.skipped_steps == 0
        ends.append(full_parameters(engine.module))
        if name == "local":
            _saved_between_local_steps(engine, folder, rank)
        engine.destroy()
    assert_same(ends[1], ends[0], f"{name} resumed")


def _engine(name: str) -> Engine:
    kind, stage, params = CONFIGURED[name]
    config = {
        "train_batch_size": dist.get_world_size(),
        "bf16": {"enabled": name == "local"},
        "optimizer": {"type": kind, "params": {"lr": 1e-3, "eps": 1e-2, **params}},
        "zero_optimization": {"stage": stage},
    }
    return zeroshard.initialize(model=frozen_model(), config=config)[0]


def _saved_between_local_steps(engine: Engine, folder: str, rank: int) -> None:
    """Each rank gets its own parameters back, which differ, in bfloat16 and as master weights; then they talk again."""
    for step in range(STEPS + 5, STEPS + 7):
        engine.backward(skipping_loss(engine, Batch(step, 0, rank)))
        engine.step()
    engine.save_checkpoint(folder, tag="apart")
    own = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    both: list[Any] = [None, None]
    dist.all_gather_object(both, own)
    assert any(not torch.equal(both[0][name], both[1][name]) for name in own)
    resumed = _engine("local")
    resumed.load_checkpoint(folder, tag="apart")
    assert_same({name: parameter.detach() for name, parameter in resumed.module.named_parameters()}, own, "own again")
    for each in (engine, resumed):
        for step in range(STEPS + 7, STEPS + 9):
            each.backward(skipping_loss(each, Batch(step, 0, rank)))
            each.step()
    assert_same(full_parameters(resumed.module), full_parameters(engine.module), "after the next talk")
    engine.save_checkpoint(folder, tag="together")
    resumed.destroy()


def test_skipped_steps_leave_no_trace_and_checkpoints_resume_in_both_phases(tmp_path: Path) -> None:
    run_ranks(2, _skips_and_resumes, str(tmp_path))
    run_ranks(1, _on_one_rank, str(tmp_path))


def _on_one_rank(rank: int, world: int, folder: str) -> None:
    """What was saved between local steps is of so many ranks; what was saved after a talk, of any number."""
    engine = _engine("local")
    with pytest.raises(CheckpointError, match=r"between local steps of ZeroOneAdam.*load it at as many ranks"):
        engine.load_checkpoint(folder, tag="apart")
    engine.load_checkpoint(folder, tag="together")
    engine.backward(skipping_loss(engine, Batch(0, 0, rank)))
    engine.step()
    engine.destroy()


def test_what_can_not_be_averaged_in_one_bit_is_refused_by_name() -> None:
    for stage in (2, 3):
        model = frozen_model()
        with pytest.raises(PlanError, match=r"OneBitAdam sends compressed momentum .* stages 0 and 1 only"):
            zeroshard.shard(model, MAKERS["OneBitAdam"](model), plan=stage)
    model = frozen_model()
    with pytest.raises(PlanError, match="OneBitLamb can't clip by the gradients' norm"):
        zeroshard.shard(model, MAKERS["OneBitLamb"](model), plan=1, clip_norm=1.0)
    with pytest.raises(PlanError, match="freeze_step 0: at least one step of warm-up"):
        zeroshard.shard(model, zeroshard.OneBitAdam(model.parameters(), freeze_step=0), plan=0)


def _finished_plans(rank: int, world: int) -> None:
    for recipe, words in (
        (Recipe(STAGES[3], moments=1, compressed=True), "1-bit optimizers run at stages 0 and 1"),
        (Recipe(STAGES[1], moments=1, compressed=True, policy=ExecutionPolicy(clip_norm=1.0)), "set clip_norm 0"),
        (Recipe(STAGES[1], moments=1), r"sends compressed momentum .*; make the plan with Recipe\(compressed=True\)"),
    ):
        model = frozen_model()
        plan = build_plan(find_units(model), recipe, world)
        with pytest.raises(PlanError, match=words):
            zeroshard.shard(model, MAKERS["OneBitAdam"](model), plan=plan)


def test_a_finished_plan_that_divides_gradients_or_clips_is_refused() -> None:
    run_ranks(2, _finished_plans)


def _norm_late(rank: int, world: int) -> None:
    model = frozen_model()
    _, optimizer = zeroshard.shard(model, MAKERS["OneBitAdam"](model), plan=0)
    for step in range(FREEZE):
        skipping_loss(model, Batch(step, 0, rank)).backward()
        optimizer.step()
    skipping_loss(model, Batch(0, 0, rank)).backward()
    with pytest.raises(UsageError, match="after the optimizer's warm-up they are never averaged"):
        zeroshard.clip_grad_norm_(model, 1.0)


def test_the_norm_is_refused_after_the_warm_up() -> None:
    run_ranks(2, _norm_late)

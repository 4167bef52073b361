"""Dion on sharded state; that it equals its unsharded reference is in test_own_optimizers.py, with the others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.matrix_models import CASES, MatrixModel, matrix_groups, matrix_loss, two_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.models import Batch, Task
from tests.support.references import PlainDion
from tests.support.training import (
    Setting,
    Values,
    assert_close,
    assert_same,
    build,
    full_parameters,
    shared_reference,
    train_sharded,
)
from zeroshard.config import load_config
from zeroshard.engine.build import build_handle
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.engine import Engine
from zeroshard.engine.outside_step.gathered import mark_parameters
from zeroshard.engine.planning import make_plan
from zeroshard.engine.step.device_stepper import DeviceStepper
from zeroshard.engine.step.regions_of import make_update_context
from zeroshard.errors import PlanError
from zeroshard.optim.clients import client_source
from zeroshard.optim.configured import configured_source
from zeroshard.optim.dion.source import DION
from zeroshard.optim.dion.update import DionUpdate
from zeroshard.optim.matrix_groups import device_update
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.parts import part_of
from zeroshard.plan.builder import Recipe, build_plan
from zeroshard.plan.factors import FACTORS, IN_FLIGHT, factor_nbytes
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy, OnNonFinite
from zeroshard.plan.traffic import step_traffic
from zeroshard.sharding.units import find_units

ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01}
WIDTH, DEPTH = 24, 16


def _dion(model: nn.Module, **matrix: Any) -> zeroshard.Dion:
    given = {"mu": 0.9, "weight_decay": 0.1, "rank_fraction": 0.5, **matrix}
    return zeroshard.Dion(matrix_groups(model, "use_dion", given, ADAM))


def _same_bits(rank: int, world: int) -> None:
    for task, setting in CASES:
        ends = [
            train_sharded(task, replace(setting, optimizer=_dion, plan=stage), rank).parameters for stage in (1, 2, 3)
        ]
        assert_same(ends[1], ends[0], "stage 2")
        assert_same(ends[2], ends[0], "stage 3")


@pytest.mark.parametrize("world", [2, 3])
def test_stages_1_to_3_give_the_same_bits(world: int) -> None:
    run_ranks(world, _same_bits)


class _Experts(nn.Module):
    """A stack of matrices whose gradients have full rank, so that each one's update depends on its right factor."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(5, 12, 10) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.stack)


def _experts_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch.normal(40, 12)) - batch.normal(5, 40, 10)).square().mean() * (batch.rank < 2)


def _all_by_dion(model: nn.Module) -> zeroshard.Dion:
    return zeroshard.Dion(model.named_parameters())


def _stacks(rank: int, world: int) -> None:
    task = Task(_Experts, _experts_loss)
    groups = {"use_dion": True, "lr": 0.01, "mu": 0.95, "rank_fraction": 0.25, "weight_decay": 0.01}
    plain = Setting(steps=5, optimizer=lambda m: PlainDion([{"params": list(m.parameters()), **groups}]))
    expected = shared_reference(task, plain, world).parameters
    for stage in (0, 3):
        found = train_sharded(task, replace(plain, optimizer=_all_by_dion, plan=stage), rank).parameters
        assert_close(found, expected, 1e-6, f"stage {stage}")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_matrix_of_a_stack_has_its_own_right_factor_wherever_the_ranks_part(world: int) -> None:
    run_ranks(world, _stacks)


def _planned(rank: int, world: int) -> list[int]:
    buffers: list[int] = []
    for stage in (0, 1, 2, 3):
        model = build(CASES[0][0])
        _, optimizer = zeroshard.shard(model, _dion(model), plan=stage)
        first = zeroshard.plan_of(model)
        assert Plan.from_json(first.to_json()) == first
        for _ in range(3):
            forget_sent(model)
            matrix_loss(model, Batch(0, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        plan = zeroshard.plan_of(model)
        assert sent(model) == step_traffic(plan), stage
        assert held_bytes(model) == replace(state_bytes(plan), no_sync=0, step=0), stage
        buffers.append(_update(model, optimizer.param_groups).buffer_nbytes)
        assert state_bytes(plan).step == buffers[-1]
        parts = [part for each in factor_nbytes(plan).values() for part in each]
        assert (len(parts) >= 4) == (stage > 0)
        assert buffers[-1] == min(IN_FLIGHT, len(parts)) * max(map(sum, parts), default=0)
        zeroshard.close(model)
    return buffers


def _update(model: nn.Module, groups: list[dict[str, Any]]) -> DionUpdate:
    """A second update over the same regions, to look at its buffers."""
    context = make_update_context(handle_of(model), groups)
    matrices = [n for n, r in enumerate(context.regions) if any(g >= 0 and groups[g]["use_dion"] for g in r.groups)]
    return part_of("matrices", context, matrices, DionUpdate).update


@pytest.mark.parametrize("world", [2, 3])
def test_what_it_sends_and_holds_is_in_the_plan(world: int) -> None:
    for buffers in run_ranks(world, _planned):
        assert buffers[0] == 0
        assert buffers[1] == buffers[2] == buffers[3] > 0


def _deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def _order(rank: int, world: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The bytes of the sums in the order in which a step issues them, and those of each part."""
    torch.manual_seed(0)
    units = [str(index) for index in range(DEPTH)]
    model = _deep()
    model, sharded = zeroshard.shard(model, _all_by_dion(model), plan=3, units=units)
    model(torch.ones(2, WIDTH)).sum().backward()
    sharded.step()
    issued = [each.nbytes for each in handle_of(model).comm.sent.tail().operations if each.unit == FACTORS]
    (parts,) = factor_nbytes(zeroshard.plan_of(model)).values()
    zeroshard.close(model)
    return issued, parts


def test_each_sum_of_a_part_is_issued_before_the_next_step_of_the_part_before_it() -> None:
    for issued, parts in run_ranks(2, _order):
        assert len(parts) == 4
        right, left, following = parts[0]
        assert parts == [parts[0]] * 4
        turns = [
            [right],
            [right, left],
            [right, left, following],
            [right, left, following],
            [left, following],
            [following],
        ]
        assert issued == [nbytes for turn in turns for nbytes in turn]


def _degenerate(rank: int, world: int) -> None:
    """Gradients of zeros change nothing but by decay, and matrices of rank 1 are updated along one direction."""
    model = nn.Sequential(nn.Linear(12, 20, bias=False), nn.Linear(20, 6, bias=False))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = zeroshard.Dion([{"params": list(model.parameters()), "use_dion": True}], lr=0.1, rank_fraction=1.0)
    _, sharded = zeroshard.shard(model, optimizer, plan=3)
    for _ in range(2):
        (model(torch.ones(3, 12)) * 0).sum().backward()
        sharded.step()
        sharded.zero_grad()
    after = list(full_parameters(model).values())
    for old, new in zip(before, after, strict=True):
        assert float((new - old * (1 - 0.1 * 0.01) ** 2).abs().max()) < 1e-7
    model(torch.ones(1, 12)).square().sum().backward()  # an outer product
    sharded.step()
    for old, new in zip(after, full_parameters(model).values(), strict=True):
        moved = (old * (1 - 0.1 * 0.01) - new).double()
        singular = torch.linalg.svdvals(moved)
        assert float(singular[0]) == pytest.approx(0.1 * math.sqrt(len(old) / old.shape[1]), rel=1e-5)
        assert float(singular[1]) < 1e-6
    zeroshard.close(model)


@pytest.mark.parametrize("world", [1, 3])
def test_zeros_and_matrices_of_rank_one_give_finite_updates_without_noise(world: int) -> None:
    run_ranks(world, _degenerate)


def _inactive(rank: int, world: int) -> None:
    """Momentum and right factors of parameters without a gradient, or in a skipped step, stay as they are."""
    model = build(CASES[0][0])
    _, optimizer = zeroshard.shard(model, _dion(model), plan=2)
    two_ranks(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    held = {name: _state(parameter) for name, parameter in _matrices(model)}
    assert all(right.any() and momentum.any() for momentum, right in held.values())
    two_ranks(model, Batch(1, 0, rank)).backward()  # block 2 is not used
    optimizer.step()
    changed = {
        name
        for name, parameter in _matrices(model)
        if not all(torch.equal(new, old) for new, old in zip(_state(parameter), held[name], strict=True))
    }
    assert changed == {name for name in held if not name.startswith("blocks.2.")}
    zeroshard.close(model)


def _matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() > 1 and p.requires_grad]


def _state(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = [zeroshard.safe_get_full_optimizer_state(parameter, key) for key in ("momentum_buffer", "right_factor")]
    momentum, right = found
    assert momentum is not None
    assert right is not None
    return momentum.clone(), right.clone()


def test_the_state_of_a_parameter_without_a_gradient_stays() -> None:
    run_ranks(2, _inactive)


def _skipped(rank: int, world: int) -> None:
    """The step whose host knows nothing computes with gradients that are not finite, and keeps nothing of them."""
    model = build(CASES[0][0])
    recipe = Recipe(STAGES[3], policy=ExecutionPolicy(on_nonfinite=OnNonFinite.SKIP))
    source, cpu = client_source(_dion(model), (), allow_untested=False), torch.device("cpu")
    handle = build_handle(model, make_plan(model, recipe, source, cpu), device=cpu)
    mark_parameters(handle)
    update = device_update(DION, make_update_context(handle, source.groups), source.groups)
    optimizer = ShardedOptimizer(source.groups, source.defaults, DeviceStepper(handle, update, None), "Dion")
    for bad in (1.0, math.inf, math.nan, 1.0):
        before = {name: tensor.clone() for name, tensor in update.tensors().items() if name.startswith("matrices")}
        parameters = full_parameters(model)
        (two_ranks(model, Batch(0, 0, rank)) * (bad if rank == 0 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = [torch.equal(update.tensors()[name], old) for name, old in before.items() if old.numel()]
        assert kept
        assert all(kept) == (bad != 1.0)
        if bad != 1.0:
            assert_same(full_parameters(model), parameters)
        else:
            assert all(torch.isfinite(values).all() for values in full_parameters(model).values())
    zeroshard.close(model)


def test_a_step_that_the_device_skips_leaves_no_trace() -> None:
    run_ranks(2, _skipped)


def _keeps_columns(rank: int, world: int) -> None:
    """A gradient of rank 1 renews one column of the right factor, and leaves those that it says nothing about."""
    model = nn.Linear(12, 8, bias=False)
    optimizer = zeroshard.Dion(model.named_parameters(), lr=0.01, mu=0.0, rank_fraction=1.0)
    _, sharded = zeroshard.shard(model, optimizer, plan=3)
    held: list[torch.Tensor] = []
    for batch in (torch.randn(20, 12, generator=torch.Generator().manual_seed(rank)), torch.ones(1, 12)):
        model(batch).square().sum().backward()
        sharded.step()
        sharded.zero_grad()
        held.append(_state(model.weight)[1].view(-1)[: 8 * 12].view(8, 12))
    assert not torch.equal(held[1][0], held[0][0])
    assert torch.equal(held[1][1:], held[0][1:])
    assert float((held[1].norm(dim=1) - 1).abs().max()) < 1e-6
    zeroshard.close(model)


def test_columns_of_the_right_factor_that_a_step_does_not_use_are_kept() -> None:
    run_ranks(2, _keeps_columns)


def _engine(fraction: float = 0.5) -> Engine:
    model = build(CASES[0][0])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Dion", "params": {"lr": 0.02, "rank_fraction": fraction}},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
    }
    return zeroshard.initialize(model=model, config=config)[0]


def _train(engine: Engine, rank: int, world: int, steps: range) -> None:
    """Gradients are those of the first rank alone, at any number of ranks."""
    for step in steps:
        loss = matrix_loss(engine, Batch(2 * step, 0, 0)) * (world if rank == 0 else 0)
        engine.backward(loss)
        engine.step()


def _saves(rank: int, world: int, folder: str) -> Values:
    engine = _engine()
    _train(engine, rank, world, range(2))
    engine.save_checkpoint(folder)
    _train(engine, rank, world, range(2, 4))
    found = full_parameters(engine.module)
    engine.destroy()
    return found


def _loads(rank: int, world: int, folder: str, fraction: float = 0.5) -> tuple[Values, dict[str, torch.Tensor]]:
    engine = _engine(fraction)
    engine.load_checkpoint(folder)
    loaded = {name: _state(parameter)[1] for name, parameter in _matrices(engine.module)}
    _train(engine, rank, world, range(2, 4))
    found = full_parameters(engine.module)
    engine.destroy()
    return found, loaded


def test_a_checkpoint_loads_at_other_numbers_of_ranks(tmp_path: Path) -> None:
    expected = run_ranks(2, _saves, str(tmp_path))[0]
    for world in (1, 3):
        for found, _ in run_ranks(world, _loads, str(tmp_path)):
            assert_close(found, expected, 5e-6, f"{world} ranks")


def test_a_checkpoint_with_another_rank_of_the_factors_gives_the_first_columns(tmp_path: Path) -> None:
    run_ranks(2, _saves, str(tmp_path))
    for fraction in (0.25, 1.0):
        found, loaded = run_ranks(2, _loads, str(tmp_path), fraction)[0]
        assert all(torch.isfinite(values).all() for values in found.values())
        right = loaded["blocks.0.up.weight"].view(-1)[: 8 * 16].view(8, 16)  # of rank 8 when saved
        assert float((right.norm(dim=1) - 1).abs().max()) < 1e-6


def test_the_config_gives_each_kind_its_rate_and_leaves_the_head_to_adam() -> None:
    model = MatrixModel()
    vars(model.inp.weight)["use_dion"] = False
    names = {id(p): name for name, p in model.named_parameters()}
    params = {"lr": 0.5, "adam_lr": 0.1, "rank_fraction": 0.3}
    config = load_config({"train_batch_size": 1, "optimizer": {"type": "dion", "params": params}}, world_size=1)
    assert config.optimizer is not None
    source = configured_source("Dion", config.optimizer.params, list(model.parameters()), names)
    rates = {names[id(p)]: (group["use_dion"], group["lr"]) for group in source.groups for p in group["params"]}
    assert {name for name, (dion, _) in rates.items() if dion} == {
        name for name, p in model.named_parameters() if name.startswith("blocks") and p.dim() >= 2
    }
    assert {rate for _, rate in rates.values()} == {0.5, 0.1}
    assert rates["lm_head.weight"] == rates["inp.weight"] == (False, 0.1)
    ranks = {names[key]: rank for key, rank in source.factor_ranks.items()}
    assert ranks["blocks.0.up.weight"] == 5  # of 16
    assert ranks["blocks.0.experts"] == 2  # of 5
    assert ranks["blocks.0.kernel"] == 2  # of 4


def test_groups_and_plans_that_make_no_sense_are_refused() -> None:
    model = MatrixModel()
    vectors = [p for p in model.parameters() if p.dim() == 1]
    with pytest.raises(PlanError, match="'use_dion': True and a parameter of shape"):
        zeroshard.shard(model, zeroshard.Dion([{"params": vectors, "use_dion": True}]))
    with pytest.raises(PlanError, match="give each group 'use_dion': True or False"):
        zeroshard.shard(model, zeroshard.Dion(model.parameters()))
    with pytest.raises(PlanError, match=r"rank_fraction 0\.0: a number above 0"):
        zeroshard.shard(model, zeroshard.Dion(model.named_parameters(), rank_fraction=0.0))
    with pytest.raises(PlanError, match=r"mu 1\.5"):
        zeroshard.shard(model, zeroshard.Dion(model.named_parameters(), mu=1.5))


def _other_plans(rank: int, world: int) -> None:
    model = MatrixModel()
    zeroshard.shard(model, _dion(model), plan=3)
    plan = zeroshard.plan_of(model)
    zeroshard.close(model)
    model = MatrixModel()
    with pytest.raises(PlanError, match="factor_ranks of the plan are for Dion, not for AdamW"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=plan)
    without = build_plan(find_units(model), Recipe(STAGES[3]), world)
    with pytest.raises(PlanError, match=r"name the matrices in Recipe\(factor_ranks=...\)"):
        zeroshard.shard(model, _dion(model), plan=without)
    units = plan.units
    index = next(i for i, unit in enumerate(units) if any(group.factor_ranks for group in unit.groups))
    groups = tuple(
        replace(group, factor_ranks=(99,) * len(group.factor_ranks)) if group.factor_ranks else group
        for group in units[index].groups
    )
    wrong = (*units[:index], replace(units[index], groups=groups), *units[index + 1 :])
    with pytest.raises(PlanError, match=r"factor_ranks\[0\] is 99, of a parameter of shape"):
        replace(plan, units=wrong)


def test_a_plan_for_another_optimizer_is_refused() -> None:
    run_ranks(2, _other_plans)

"""Optimizers that torch lacks, or that see whole parameters: sharded they equal plain unsharded ones.

All are equal bit for bit, but those whose updates depend on sums over ranks (`FAR`).

Only two batches have a gradient that is not zero. A sum of two numbers and zeros does not depend on the order, so
nothing may differ at any world size, although Muon would blow the slightest difference up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.cases import sample
from tests.support.distributed import run_ranks
from tests.support.matrix_models import CASES, MatrixModel, matrix_groups, matrix_loss, two_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.models import Batch
from tests.support.references import PlainDion, PlainLamb, PlainLion, PlainMuon
from tests.support.training import (
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
from zeroshard.engine.step.step_base import StepperBase
from zeroshard.engine.step.stepper import HostStepper
from zeroshard.errors import PlanError
from zeroshard.optim.clients import client_source
from zeroshard.optim.configured import configured_source
from zeroshard.optim.dion.source import DION
from zeroshard.optim.lamb import LambUpdate
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.matrix_groups import device_update
from zeroshard.optim.muon.newton_schulz import orthogonalize
from zeroshard.optim.muon.source import MUON
from zeroshard.optim.muon.update import MatrixUpdate
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.parts import part_of
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.matrices import exchange_nbytes
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.placement import STAGES, Sharding
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy, OnNonFinite
from zeroshard.plan.traffic import step_traffic

Make = Callable[[nn.Module], torch.optim.Optimizer]


def _two_groups(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() <= 1], **second},
    ]


def _muon_groups(model: nn.Module, **matrix: Any) -> list[dict[str, Any]]:
    common = {"momentum": 0.9, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1, "adjust_lr_fn": None, **matrix}
    return matrix_groups(model, "use_muon", common, ADAM)


def _dion_groups(model: nn.Module, rank_fraction: float = 0.5) -> list[dict[str, Any]]:
    return matrix_groups(model, "use_dion", {"mu": 0.9, "weight_decay": 0.1, "rank_fraction": rank_fraction}, ADAM)


ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01}
LION: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
LAMB: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
BOUNDS = {"eps_inside_sqrt": False, "bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01}
OTHER_BOUNDS = {"eps_inside_sqrt": True, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.1}

PAIRS: dict[str, tuple[Make, Make]] = {
    "Lion": (
        lambda m: zeroshard.Lion(_two_groups(m, weight_decay=0.0, lr=5e-4), **LION),
        lambda m: PlainLion(_two_groups(m, weight_decay=0.0, lr=5e-4), **LION),
    ),
    "Lamb": (
        lambda m: zeroshard.Lamb(_two_groups(m, weight_decay=0.0, max_coeff=1.0), **LAMB, **BOUNDS),
        lambda m: PlainLamb(_two_groups(m, weight_decay=0.0, max_coeff=1.0), **LAMB, **BOUNDS),
    ),
    "Lamb bounded": (
        lambda m: zeroshard.Lamb(_two_groups(m, lr=0.02), **LAMB, **OTHER_BOUNDS),
        lambda m: PlainLamb(_two_groups(m, lr=0.02), **LAMB, **OTHER_BOUNDS),
    ),
    "Muon": (lambda m: zeroshard.MuonAdamW(_muon_groups(m)), lambda m: PlainMuon(_muon_groups(m))),
    "Dion": (lambda m: zeroshard.Dion(_dion_groups(m)), lambda m: PlainDion(_dion_groups(m))),
    "Dion of full rank": (
        lambda m: zeroshard.Dion(_dion_groups(m, rank_fraction=1.0)),
        lambda m: PlainDion(_dion_groups(m, rank_fraction=1.0)),
    ),
    "Muon as AdamW": (
        lambda m: zeroshard.MuonAdamW(_muon_groups(m, adjust_lr_fn="match_rms_adamw", nesterov=False)),
        lambda m: PlainMuon(_muon_groups(m, adjust_lr_fn="match_rms_adamw", nesterov=False)),
    ),
}


MAIN = ("Lion", "Lamb", "Muon", "Dion")
FAR = {"Lamb": 5e-7, "Lamb bounded": 5e-7, "Dion": 5e-6, "Dion of full rank": 5e-4}
"""How far a parameter may be from the reference: norms and factors are sums, whose order depends on the sharding.

Dion's are float64, and its state is that of the reference but for a last digit here and there, which changes the next
gradient. A direction along which the momentum is a hundredth of its largest turns a hundred times as far.
"""


def _equal(rank: int, world: int, stages: tuple[int, ...], names: tuple[str, ...]) -> int:
    checked = 0
    for name in names:
        ours, plain = PAIRS[name]
        for task, setting in CASES if world == 2 else CASES[:1]:
            reference = shared_reference(task, replace(setting, optimizer=plain), world)
            # Variants of an update are sharded as it is: one stage will do.
            for stage in stages if name in MAIN else stages[-1:]:
                outcome = train_sharded(task, replace(setting, optimizer=ours, plan=stage), rank)
                what = f"{name}, stage {stage}, micro {setting.micro}"
                if name in FAR:
                    assert_close(outcome.parameters, reference.parameters, FAR[name], what)
                else:
                    assert_same(outcome.parameters, reference.parameters, what)
                checked += 1
    return checked


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_equals_its_unsharded_reference(world: int) -> None:
    stages = {1: (3,), 2: (0, 1, 2, 3), 3: (1,), 4: (2,)}[world]
    checked = run_ranks(world, _equal, stages, tuple(PAIRS) if world == 2 else MAIN)
    assert checked == [{1: 4, 2: 38, 3: 4, 4: 4}[world]] * world


def _in_subgroups(rank: int, world: int) -> None:
    """State divided within pairs of ranks, each pair holding all of it."""
    task, setting = CASES[0]
    recipe = Recipe(Sharding(param=True, grad=True, state=True, axes=("dp_shard",)))
    for name in ("Lamb", "Muon", "Dion"):
        ours, plain = PAIRS[name]
        reference = shared_reference(task, replace(setting, optimizer=plain, steps=3), world)
        model = build(task)
        _, optimizer = zeroshard.shard(model, ours(model), plan=recipe, shard_size=2)
        for step in range(3):
            forget_sent(model)
            two_ranks(model, Batch(step, 0, rank)).backward()
            optimizer.step()
        assert sent(model) == step_traffic(zeroshard.plan_of(model)), name
        assert_close(full_parameters(model), reference.parameters, FAR.get(name, 5e-7), name)
        zeroshard.close(model)


def test_lamb_muon_and_dion_over_state_that_is_divided_within_subgroups() -> None:
    run_ranks(4, _in_subgroups)


def _planned(rank: int, world: int) -> list[int]:
    """Traffic and bytes are those of the plan, for Lamb's sums and Muon's exchange too; buffers of each exchange."""
    buffers: list[int] = []
    for name in ("Lamb", "Muon"):
        for stage in (0, 1, 2, 3):
            model = build(CASES[0][0])
            _, optimizer = zeroshard.shard(model, PAIRS[name][0](model), plan=stage)
            first = zeroshard.plan_of(model)
            assert Plan.from_json(first.to_json()) == first
            for _ in range(3):
                forget_sent(model)
                matrix_loss(model, Batch(0, 0, rank)).backward()
                optimizer.step()
            plan = zeroshard.plan_of(model)
            assert sent(model) == step_traffic(plan), (name, stage)
            assert held_bytes(model) == replace(state_bytes(plan), no_sync=0, step=0), (name, stage)
            if name == "Muon":
                buffers.append(_exchange(model, optimizer.param_groups).buffer_nbytes)
                assert state_bytes(plan).step >= buffers[-1]
                parts = sum(map(len, exchange_nbytes(plan).values()))
                assert step_traffic(plan).calls.get("all-to-all", 0) == 2 * parts
                assert (parts > 0) == (stage > 0)
            zeroshard.close(model)
    return [*buffers, state_bytes(plan).step, sum(_matrix_bytes(plan))]


def _exchange(model: nn.Module, groups: list[dict[str, Any]]) -> MatrixUpdate:
    """A second update over the same regions, to look at its buffers."""
    context = make_update_context(handle_of(model), groups)
    matrices = [n for n, r in enumerate(context.regions) if any(g >= 0 and groups[g]["use_muon"] for g in r.groups)]
    return part_of("matrices", context, matrices, MatrixUpdate).update


def _matrix_bytes(plan: Plan) -> list[int]:
    return [2 * segment.numel for _, group in plan.groups() if group.owners for segment in group.layout.segments]


@pytest.mark.parametrize("world", sample([2, 3]))
def test_what_lamb_and_muon_send_and_hold_is_in_the_plan(world: int) -> None:
    found = run_ranks(world, _planned)
    for stage in (1, 2, 3):
        assert max(rank[stage] for rank in found) == found[0][-2]
        # Pieces go into one buffer and owned matrices into the other: all matrices twice, over all ranks.
        assert sum(rank[stage] for rank in found) == 2 * found[0][-1]
    assert [rank[0] for rank in found] == [0] * world


def _on_device(rank: int, world: int) -> None:
    """The step whose host knows nothing gives what the host's step gives; here on the CPU."""
    kinds = {"Muon": MUON, "Dion": DION}
    for name in ("Lamb", "Muon", "Dion"):
        for stage in (0, 3):
            ends: list[dict[str, torch.Tensor]] = []
            for on_device in (False, True):
                model = build(CASES[0][0])
                source = client_source(PAIRS[name][0](model), (), allow_untested=False)
                cpu = torch.device("cpu")
                handle = build_handle(model, make_plan(model, stage, source, cpu, clip_norm=0.5), device=cpu)
                mark_parameters(handle)
                context = make_update_context(handle, source.groups)
                if on_device:
                    kind = kinds.get(name)
                    update = LambUpdate(context) if kind is None else device_update(kind, context, source.groups)
                    stepper: StepperBase = DeviceStepper(handle, update, None)
                else:
                    stepper = HostStepper(handle, source.update(context), None)
                optimizer = ShardedOptimizer(source.groups, source.defaults, stepper, name)
                for step in range(3):
                    two_ranks(model, Batch(step, 0, rank)).backward()
                    optimizer.step()
                ends.append(full_parameters(model))
                zeroshard.close(model)
            assert_close(ends[1], ends[0], max(1e-6, FAR.get(name, 0.0)), f"{name} at stage {stage}")


def test_the_step_without_a_host_gives_the_same() -> None:
    run_ranks(2, _on_device)


def _skips(rank: int, world: int) -> None:
    """With fp16 a step whose gradients overflow leaves no trace: neither in parameters nor in any state."""
    for name in MAIN:
        for stage in (3,):
            ends: list[dict[str, torch.Tensor]] = []
            for steps in ((0, 2, 3), (0, -1, 2, -1, 3)):
                model = build(CASES[0][0])
                policy = ExecutionPolicy(on_nonfinite=OnNonFinite.SKIP, cast_inputs="float16")
                recipe = Recipe(STAGES[stage], precision=Precision("float16"), policy=policy)
                scaler = LossScaler("cpu", dynamic=False, initial=64.0)
                _, optimizer = zeroshard.shard(model, PAIRS[name][0](model), plan=recipe, scaler=scaler)
                for step in steps:
                    loss = matrix_loss(model, Batch(abs(step), 0, rank)) * float(scaler.scale)
                    (loss * math.inf if step < 0 and rank == 0 else loss).backward()
                    optimizer.step()
                ends.append(full_parameters(model))
                zeroshard.close(model)
            assert_same(ends[1], ends[0], f"{name} at stage {stage}")


def test_a_skipped_fp16_step_leaves_no_trace() -> None:
    run_ranks(2, _skips)


def _resume(rank: int, world: int, folder: str) -> None:
    """Saved in the middle and loaded into a new model, the training goes on as if nothing had happened."""
    for name, params in CONFIGURED.items():
        ends: list[dict[str, torch.Tensor]] = []
        for resumed in (False, True):
            engine = _engine(name, params)
            for step in range(4):
                if resumed and step == 2:
                    engine.save_checkpoint(folder, tag=name)
                    engine.destroy()
                    engine = _engine(name, params)
                    engine.load_checkpoint(folder, tag=name)
                engine.backward(two_ranks(engine, Batch(2 * step, 0, rank)))
                engine.step()
            ends.append(full_parameters(engine.module))
            engine.destroy()
        assert_same(ends[1], ends[0], name)


CONFIGURED: dict[str, dict[str, Any]] = {
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Lamb": {"weight_decay": 0.01, "max_coeff": 0.5},
    "Muon": {"lr": 1e-3, "muon_lr": 0.02, "weight_decay": 0.1},
    "Dion": {"lr": 0.02, "adam_lr": 1e-3, "rank_fraction": 0.5},
}


def _engine(name: str, params: dict[str, Any]) -> Engine:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": name, "params": params},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 0},
    }
    model = build(CASES[0][0])
    return zeroshard.initialize(model=model, config=config)[0]


def test_each_is_named_by_a_config_and_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, _resume, str(tmp_path))


def test_the_config_of_muon_gives_each_kind_its_rate_and_leaves_the_head_to_adam() -> None:
    model = MatrixModel()
    vars(model.inp.weight)["use_muon"] = False
    names = {id(p): name for name, p in model.named_parameters()}
    config = load_config(
        {"train_batch_size": 1, "optimizer": {"type": "Muon", "params": {"lr": 0.5, "adam_lr": 0.1}}}, world_size=1
    )
    assert config.optimizer is not None
    source = configured_source("Muon", config.optimizer.params, list(model.parameters()), names)
    rates = {names[id(p)]: (group["use_muon"], group["lr"]) for group in source.groups for p in group["params"]}
    assert {name for name, (muon, _) in rates.items() if muon} == {
        name for name, p in model.named_parameters() if name.startswith("blocks") and p.dim() >= 2
    }
    assert {rate for _, rate in rates.values()} == {0.5, 0.1}
    assert rates["lm_head.weight"] == (False, 0.1)
    assert rates["inp.weight"] == (False, 0.1)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (12, 12), (3, 6, 20)])
def test_the_gram_method_is_the_standard_method_with_less_rounding(shape: tuple[int, ...]) -> None:
    hyper = {"ns_steps": 5, "ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7}
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-6
    standard = orthogonalize(matrix.bfloat16(), {**hyper, "ns_method": "standard"})
    gram = orthogonalize(matrix.bfloat16(), {**hyper, "ns_method": "gram"})
    singular = torch.linalg.svdvals(gram.float())
    assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3
    assert float((gram.float() - standard.float()).norm() / standard.float().norm()) < 0.05


def test_groups_that_make_no_sense_are_refused() -> None:
    model = MatrixModel()
    vectors = [p for p in model.parameters() if p.dim() == 1]
    with pytest.raises(PlanError, match="'use_muon': True and a parameter of shape"):
        zeroshard.shard(model, zeroshard.MuonAdamW([{"params": vectors, "use_muon": True}]))
    with pytest.raises(PlanError, match="does not say whether it is of matrices"):
        zeroshard.shard(model, zeroshard.MuonAdamW(model.parameters()))
    with pytest.raises(PlanError, match="two numbers with 0 <= min_coeff"):
        zeroshard.shard(model, zeroshard.Lamb(model.parameters(), min_coeff=2.0, max_coeff=1.0))
    with pytest.raises(PlanError, match="ns_method 'svd'"):
        zeroshard.shard(model, zeroshard.MuonAdamW(model.named_parameters(), ns_method="svd"))


def _torch_muon(rank: int, world: int) -> None:
    """torch's own Muon, over some matrices, is accepted as it is."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n], lr=0.02)

    task, setting = CASES[0]
    reference = shared_reference(task, replace(setting, optimizer=make), world)
    for stage in (0, 3):
        outcome = train_sharded(task, replace(setting, optimizer=make, plan=stage), rank)
        assert_same(outcome.parameters, reference.parameters, f"stage {stage}")


def test_the_muon_of_torch_is_taken_bit_for_bit() -> None:
    run_ranks(2, _torch_muon)

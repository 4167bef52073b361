"""Expert parallelism: experts that are divided over ranks train under ZeRO as one process does."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.expert_model import EVEN, EXPERTS, ONE_RANK, UNEVEN, Layout, build, sharded
from tests.support.gathering_model import gathering
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.parallel_model import (
    BATCH,
    CLIP,
    LENGTH,
    State,
    Step,
    Transformer,
    assert_close,
    assert_same,
    in_one_process,
    loss_of,
    loss_of_part,
    tokens,
    train,
    whole_state,
)
from zeroshard.errors import PlanError
from zeroshard.mesh import Mesh, MeshAxis
from zeroshard.plan.builder import Recipe, build_plan
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import Plan
from zeroshard.plan.traffic import step_traffic
from zeroshard.planner.trace.divided import Parts
from zeroshard.planner.trace.sources import module_source
from zeroshard.planner.trace.workload import Workload
from zeroshard.sharding.layout import FlatLayout
from zeroshard.sharding.sharded_init import ShardedInit

WHOLE_MATRIX = os.environ.get("ZEROSHARD_ALL_MESHES") == "1"
MESHES = [(1, 2), (2, 2)] + ([(1, 4), (2, 4)] if WHOLE_MATRIX else [])


def _as_in_one_process(rank: int, world: int, data: int, experts: int, biases: Sequence[Sequence[float]]) -> None:
    for number, bias in enumerate(biases):
        wanted = in_one_process(world, made=partial(build, bias))
        for stage in range(4) if WHOLE_MATRIX else (2 * number + (data > 1),):
            layout = Layout(data, experts, stage)
            model, optimizer = sharded(layout, bias)
            steps = train(model, optimizer, rank, range(2))
            forget_sent(model)
            steps += train(model, optimizer, rank, range(2, 3))
            plan = zeroshard.plan_of(model)
            assert sent(model) == step_traffic(plan), str(layout)
            assert held_bytes(model).total == state_bytes(plan).total
            assert plan.dp == world
            assert _layouts(plan) == _layouts(_predicted(bias, layout))
            assert_close((steps, zeroshard.full_state_dict(model)), wanted, (str(layout), bias))
            zeroshard.close(model)


def _predicted(bias: Sequence[float], layout: Layout) -> Plan:
    """What the planner makes of the model on the meta device."""
    source = module_source("experts", partial(build, bias))
    sizes = {"dp_replicate": 1, "dp_shard": layout.data, "ep": layout.experts}
    mesh = Mesh(tuple(MeshAxis(name, size) for name, size in sizes.items()))
    units = Workload(source, 1, LENGTH, parts=Parts(experts=layout.experts)).units
    return build_plan(units, Recipe(STAGES[layout.stage]), mesh)


def _layouts(plan: Plan) -> list[list[FlatLayout]]:
    return [[group.layout for group in unit.groups] for unit in plan.units]


@pytest.mark.parametrize(("data", "experts"), MESHES)
def test_divided_experts_train_as_one_process_does(data: int, experts: int) -> None:
    run_ranks(data * experts, _as_in_one_process, data, experts, (EVEN, ONE_RANK), timeout=600)


def _has_bits(rank: int, world: int, axis: str, chosen: int, wanted: tuple[list[Step], State]) -> None:
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=(axis,))
    for stage in range(4):
        model = build(UNEVEN, chosen)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = zeroshard.shard(model, optimizer, plan=stage, mesh=mesh)
        train(model, optimizer, rank, range(3))
        found = whole_state(model)
        assert sum(name.endswith(".exp_avg_sq") for name in found) > 20
        assert_same(found, wanted[1], f"stage {stage}, {chosen} experts of a token")
        zeroshard.close(model)


@pytest.mark.parametrize(
    ("ranks", "axis", "chosen"),
    [(2, "ep", 3), (4, "ep", 2)] + ([(2, "ep", 2), (4, "ep", 3), (4, "dp_shard", 2)] if WHOLE_MATRIX else []),
)
def test_divided_experts_have_the_bits_of_one_process_where_torch_is_to_be_deterministic(
    ranks: int, axis: str, chosen: int
) -> None:
    wanted = in_one_process(ranks, made=partial(build, UNEVEN, chosen), clip=math.inf)
    run_ranks(ranks, _has_bits, axis, chosen, wanted)


def _moved(rank: int, world: int, folder: str, layouts: list[Layout]) -> None:
    for layout in layouts:
        model, optimizer = sharded(layout, ONE_RANK)
        train(model, optimizer, rank, range(1))
        saved = whole_state(model)
        tag = f"{layout.experts}-{layout.stage}"
        zeroshard.save(model, folder, tag)
        zeroshard.close(model)
        for other in layouts:
            if other == layout and not WHOLE_MATRIX:
                continue
            model, optimizer = sharded(other, ONE_RANK)
            zeroshard.load(model, folder, tag)
            assert_same(whole_state(model), saved, f"{layout} into {other}")
            zeroshard.close(model)


def test_a_checkpoint_of_experts_loads_in_any_other_layout(tmp_path: Path) -> None:
    shapes = itertools.product(((4, 1), (2, 2), (1, 4)), range(4)) if WHOLE_MATRIX else (((2, 2), 3), ((4, 1), 1))
    run_ranks(4, _moved, str(tmp_path), [Layout(*shape, stage) for shape, stage in shapes], timeout=900)


BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": CLIP,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
}
CONFIGS: dict[str, tuple[dict[str, Any], float]] = {
    "accumulated": ({"gradient_accumulation_steps": 2}, 1e-5),
    "bf16": ({"bf16": {"enabled": True}}, 0.05),
    "offload": ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 1e-5),
}


def _engines(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep"))
    for name, (config, bound) in CONFIGS.items():
        accumulation = int(config.get("gradient_accumulation_steps", 1))
        wanted, _ = in_one_process(world * accumulation, 2, made=build)
        model = build()
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **config.get("zero_optimization", {})}
        engine, *_ = zeroshard.initialize(
            model=model, config={**BASE, **config, "zero_optimization": zero}, mesh_param=mesh
        )
        assert engine.train_batch_size() == BATCH * world * accumulation
        for step, (_, norm) in enumerate(wanted):
            for micro in range(accumulation):
                engine.backward(loss_of(engine, tokens(step, rank * accumulation + micro)))
                engine.step()
            found = engine.get_global_grad_norm()
            assert found is not None
            assert abs(found - norm) <= bound * norm, (name, norm, found)
        assert held_bytes(model).total == state_bytes(engine.plan).total, name
        engine.destroy()


def test_initialize_takes_divided_experts() -> None:
    run_ranks(2, _engines)


def _overflows(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep"))
    config = {**BASE, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    engine, *_ = zeroshard.initialize(model=build(), config=config, mesh_param=mesh)
    before = zeroshard.full_state_dict(engine.module)
    engine.backward(loss_of(engine, tokens(0, rank)))
    parameter = engine.module.get_parameter("blocks.0.mlp.experts.down_proj")
    part = zeroshard.safe_get_local_grad(parameter)
    assert part is not None
    zeroshard.safe_set_local_grad(parameter, torch.full_like(part, torch.inf) if rank == 1 else part)
    engine.step()
    assert not engine.was_step_applied()
    after = zeroshard.full_state_dict(engine.module)
    assert all(torch.equal(before[name], after[name]) for name in before)
    whole = zeroshard.safe_get_full_fp32_param(parameter)
    assert whole is not None
    assert whole.shape == parameter.shape
    assert parameter.shape[0] == EXPERTS
    assert isinstance(parameter, DTensor)
    data = torch.utils.data.TensorDataset(torch.arange(8))
    read = torch.cat([batch[0] for batch in engine.deepspeed_io(data)])
    others = [torch.zeros_like(read) for _ in range(world)]
    dist.all_gather(others, read)
    assert torch.equal(torch.cat(others).sort().values, torch.arange(8))


def test_an_overflow_of_one_rank_s_experts_skips_the_step_on_all() -> None:
    run_ranks(2, _overflows)


def _by_config(rank: int, world: int) -> None:
    wanted, _ = in_one_process(world, 2, made=build)
    model = build()
    config = {**BASE, "zero_optimization": {"stage": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    del config["optimizer"]
    with ShardedInit():  # what deepspeed.zero.Init leaves behind
        shared = build()
    for one in (model, shared):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
        engine, *_ = zeroshard.initialize(model=one, optimizer=optimizer, config=config)
        assert engine.train_batch_size() == BATCH * world
        for step, (_, norm) in enumerate(wanted):
            engine.backward(loss_of(engine, tokens(step, rank)))
            engine.step()
            found = engine.get_global_grad_norm()
            assert found is not None
            assert abs(found - norm) < 1e-6 * max(1.0, norm)
        trained = zeroshard.full_state_dict(one)
        engine.destroy()
        engine, *_ = zeroshard.initialize(  # the parts of a closed engine are another's
            model=one, optimizer=torch.optim.AdamW(one.parameters(), lr=1e-3), config=config
        )
        assert_same(zeroshard.full_state_dict(one), trained, "a closed engine")
        engine.destroy()
    with pytest.raises(PlanError, match=r"expert_parallel.autoep_size 3 does not divide the 2 ranks that run"):
        zeroshard.initialize(model=build(), config={**BASE, "expert_parallel": {"enabled": True, "autoep_size": 3}})


def test_a_config_divides_the_experts() -> None:
    run_ranks(2, _by_config)


def _with_divided_sequences(rank: int, world: int) -> None:
    wanted = in_one_process(2, made=build)
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_shard", "ep", "cp"))
    place, group = mesh.get_local_rank("cp"), mesh.get_group("cp")
    window = slice(place * (LENGTH // 2), (place + 1) * (LENGTH // 2))
    for stage in range(4):
        model, optimizer = zeroshard.shard(
            gathering(build(), group, place), partial(torch.optim.AdamW, lr=1e-3), plan=stage, mesh=mesh, clip_norm=CLIP
        )
        found = train(model, optimizer, rank // 2, range(3), loss_of_part(window))
        assert_close((found, zeroshard.full_state_dict(model)), wanted, stage)
        zeroshard.close(model)


@pytest.mark.skipif(not WHOLE_MATRIX, reason="set ZEROSHARD_ALL_MESHES=1")
def test_experts_and_sequences_are_divided_at_once() -> None:
    run_ranks(4, _with_divided_sequences, timeout=300)


def _frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name and "embedding" not in name)
    return model


def _checkpointed(model: nn.Module) -> nn.Module:
    zeroshard.checkpoint_activations(model)
    return model


def _compiled(model: nn.Module) -> nn.Module:
    assert isinstance(model, Transformer)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "frozen": _frozen,
    "checkpointed": _checkpointed,
    "compiled": _compiled,
}


def _made(way: Callable[[nn.Module], nn.Module] | None) -> nn.Module:
    model = build(ONE_RANK)
    return model if way is None else way(model)


def _in_other_ways(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep"))
    for name, way in WAYS.items():
        wanted = in_one_process(world, made=partial(_made, _frozen if way is _frozen else None))
        model = way(build(ONE_RANK))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, optimizer = zeroshard.shard(
            model, torch.optim.AdamW(trained, lr=1e-3), plan=3, mesh=mesh, clip_norm=CLIP
        )
        assert_close((train(model, optimizer, rank, range(3)), zeroshard.full_state_dict(model)), wanted, name)
        with torch.no_grad():
            model(tokens(0, rank)[:, :-1])
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, tokens(0, rank))
        loss.backward()
        optimizer.step()
        zeroshard.close(model)


def test_experts_are_frozen_checkpointed_compiled_or_autocast_as_other_parameters_are() -> None:
    run_ranks(2, _in_other_ways)


def _refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep"))
    with pytest.raises(PlanError, match=r"mlp.experts has 3 experts, which 2 ranks of axis 'ep' do not divide"):
        zeroshard.shard(build((0.0,) * 3), mesh=mesh)
    with pytest.raises(PlanError, match="nothing uses it: Linear has no experts that are divided over ranks"):
        zeroshard.shard(nn.Linear(2, 2), mesh=mesh)
    with zeroshard.Init():
        deferred = build()
    with pytest.raises(PlanError, match=r"'blocks.0.mlp.experts.gate_up_proj' has no values yet"):
        zeroshard.shard(deferred, mesh=mesh)
    outer = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "dp_shard"))
    with pytest.raises(PlanError, match="must come after the data axes"):
        zeroshard.shard(build(), mesh=outer)
    config = {**BASE, "zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}
    with pytest.raises(PlanError, match="not supported on a mesh that divides sequences or experts"):
        zeroshard.initialize(model=build(), config=config, mesh_param=mesh)


def test_experts_that_cannot_be_divided_are_refused_by_number() -> None:
    run_ranks(2, _refused)

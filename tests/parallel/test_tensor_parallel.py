"""Tensor parallelism: a model divided by torch.distributed.tensor.parallel trains under ZeRO as one process does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import held_bytes
from tests.support.parallel_model import (
    BATCH,
    CLIP,
    Layout,
    Step,
    assert_close,
    build,
    divide,
    in_one_process,
    loss_of,
    sharded,
    tokens,
    train,
)
from zeroshard.errors import PlanError
from zeroshard.plan.memory import state_bytes
from zeroshard.sharding.sharded_init import ShardedInit

WHOLE_MATRIX = os.environ.get("ZEROSHARD_ALL_MESHES") == "1"
MESHES = [(1, 2), (2, 2)] + ([(4, 1), (1, 4), (4, 2), (2, 4)] if WHOLE_MATRIX else [])


def _as_in_one_process(rank: int, world: int, data: int, tensor: int, sequence: Sequence[bool]) -> None:
    wanted = in_one_process(data)
    for stage in range(4) if WHOLE_MATRIX else (1, 3) if data > 1 else (0,):
        for divided in sequence:
            layout = Layout(data, tensor, stage)
            model, optimizer = sharded(layout, sequence=divided)
            steps = train(model, optimizer, layout.reader, range(3))
            assert held_bytes(model).total == state_bytes(zeroshard.plan_of(model)).total
            assert_close((steps, zeroshard.full_state_dict(model)), wanted, (layout, divided))
            zeroshard.close(model)


@pytest.mark.parametrize(("data", "tensor"), MESHES)
def test_a_divided_model_trains_as_one_process_does(data: int, tensor: int) -> None:
    sequence = (False, True) if tensor > 1 and (WHOLE_MATRIX or data == 1) else (False,)
    run_ranks(data * tensor, _as_in_one_process, data, tensor, sequence, timeout=300)


def _engines(rank: int, world: int, config: dict[str, Any], data: int, bound: float) -> None:
    accumulation = int(config.get("gradient_accumulation_steps", 1))
    wanted, _ = in_one_process(data * accumulation, 2)
    mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=("dp_shard", "tp"))
    for stage in (1, 3) if WHOLE_MATRIX else (2,):
        model = divide(build(), mesh["tp"])
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **config.get("zero_optimization", {})}
        engine, *_ = zeroshard.initialize(model=model, config={**BASE, **config, "zero_optimization": zero})
        assert engine.train_batch_size() == engine.train_micro_batch_size_per_gpu() * data * accumulation
        for step, (_, norm) in enumerate(wanted):
            for micro in range(accumulation):
                found = loss_of(engine, tokens(step, (rank // 2) * accumulation + micro))
                engine.backward(found)
                engine.step()
            assert engine.was_step_applied()
            found_norm = engine.get_global_grad_norm()
            assert found_norm is not None
            assert abs(found_norm - norm) <= bound * norm, (stage, norm)
        assert held_bytes(model).total == state_bytes(engine.plan).total
        engine.destroy()


BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": CLIP,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
}
CONFIGS = {
    "fp32, accumulated": ({"gradient_accumulation_steps": 2}, 1e-5),
    "bf16": ({"bf16": {"enabled": True}}, 0.05),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 8}}, 0.02),
    "state in host memory": ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 1e-5),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_initialize_takes_a_divided_model(name: str) -> None:
    config, bound = CONFIGS[name]
    run_ranks(2, _engines, config, 1, bound)


@pytest.mark.skipif(not WHOLE_MATRIX, reason="set ZEROSHARD_ALL_MESHES=1")
@pytest.mark.parametrize("name", CONFIGS)
def test_initialize_takes_a_divided_model_on_four_ranks(name: str) -> None:
    config, bound = CONFIGS[name]
    run_ranks(4, _engines, config, 2, bound)


def _overflows(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    config = {**BASE, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    engine, *_ = zeroshard.initialize(model=divide(build(), mesh["tp"]), config=config)
    before = zeroshard.full_state_dict(engine.module)
    engine.backward(loss_of(engine, tokens(0, 0)))
    parameter = engine.module.get_parameter("blocks.0.mlp.up.weight")
    part = zeroshard.safe_get_local_grad(parameter)
    assert part is not None
    zeroshard.safe_set_local_grad(parameter, torch.full_like(part, torch.inf) if rank == 1 else part)
    engine.step()
    assert not engine.was_step_applied()
    assert engine.loss_scale == 128
    after = zeroshard.full_state_dict(engine.module)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_overflow_on_one_rank_of_an_axis_skips_the_step_on_all() -> None:
    run_ranks(2, _overflows)


def _by_loss_parallel(rank: int, world: int) -> None:
    wanted, layout = in_one_process(1), Layout(1, 2, 2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    model = divide(build(), mesh["tp"], sequence=True, loss_parallel=True)
    model, optimizer = zeroshard.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), mesh=mesh, plan=layout.stage, clip_norm=CLIP
    )
    found: list[Step] = []
    for step in range(3):
        batch = tokens(step, 0)
        with loss_parallel():
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        norm = zeroshard.get_global_grad_norm(model)
        assert norm is not None
        whole = loss.detach()
        assert isinstance(whole, DTensor)
        found.append((float(whole.full_tensor()), norm))
    assert_close((found, zeroshard.full_state_dict(model)), wanted, "loss_parallel")


def test_the_loss_is_computed_on_divided_logits() -> None:
    run_ranks(2, _by_loss_parallel)


def _refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    tp = mesh["tp"]
    odd = parallelize_module(nn.Sequential(nn.Linear(4, 5)), tp, {"0": ColwiseParallel()})
    with pytest.raises(PlanError, match=r"parameter '0.weight': dim 0 of 5 elements does not divide by the 2 ranks"):
        zeroshard.shard(odd, torch.optim.SGD(odd.parameters(), lr=0.1), mesh=mesh)
    with pytest.raises(PlanError, match=r"divided over 2 ranks of an axis 'tp', which is not in the mesh \(.*\)"):
        zeroshard.shard(divide(build(), tp), mesh=zeroshard.Mesh.data_parallel(2))
    model = divide(build(), tp)
    with pytest.raises(PlanError, match=r"divided over 2 ranks of 'tp', but the optimizer \(Muon, Dion\) works"):
        zeroshard.shard(model, zeroshard.MuonAdamW(model.named_parameters()), mesh=mesh)
    with pytest.raises(PlanError, match=r"divided over 2 ranks of 'tp', but the optimizer \(Muon, Dion\) works"):
        zeroshard.shard(model, zeroshard.Dion(model.named_parameters()), mesh=mesh)
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    sharded = parallelize_module(nn.Sequential(nn.Linear(4, 4)), data, {"0": ColwiseParallel()})
    with pytest.raises(PlanError, match=r"parameter '0.weight' is divided over 'dp_shard' already"):
        zeroshard.shard(sharded)


def test_what_cannot_be_is_refused_by_name() -> None:
    run_ranks(2, _refused)


def _draws(rank: int, world: int) -> None:
    model = build()
    model.set_submodule("norm", nn.Sequential(model.norm, nn.Dropout(0.5)))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(rank)
    divide(model, mesh["tp"])
    torch.manual_seed(rank)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), mesh=mesh, plan=1)
    loss = loss_of(model, tokens(0, 0))
    losses = [torch.zeros_like(loss) for _ in range(world)]
    dist.all_gather(losses, loss.detach())
    assert torch.equal(losses[0], losses[1])
    loss.backward()
    optimizer.step()
    weight = model.get_parameter("norm.0.weight").detach()
    weights = [torch.zeros_like(weight) for _ in range(world)]
    dist.all_gather(weights, weight)
    assert torch.equal(weights[0], weights[1])


def test_ranks_of_an_axis_drop_out_the_same_of_what_all_have() -> None:
    run_ranks(2, _draws)


COLUMNS = [r"blocks\.\d+\.attention\.[qkv]\.weight", r".*\.mlp\.up\.weight"]
ROWS = [r"blocks\.\d+\.attention\.o\.weight", r".*\.mlp\.down\.weight"]
LAYERS = {
    "layer_specs": [
        {"patterns": COLUMNS, "partition_type": "column"},
        {"patterns": ROWS, "partition_type": "row"},
    ]
}


def _by_config(rank: int, world: int) -> None:
    wanted, _ = in_one_process(1, 2)
    with ShardedInit():  # what deepspeed.zero.Init leaves behind
        shared = build()
    for model in (build(), shared):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = {
            **BASE,
            "train_batch_size": 2 * BATCH,  # over all ranks, as transformers and accelerate count them
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 2},
            "tensor_parallel": {"autotp_size": 2, "partition_config": LAYERS},
        }
        del config["optimizer"]
        engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer, config=config)
        assert isinstance(model.get_parameter("blocks.1.mlp.up.weight"), DTensor)
        assert engine.train_batch_size() == BATCH
        for step, (loss, norm) in enumerate(wanted):
            found = loss_of(engine, tokens(step, 0))
            engine.backward(found)
            engine.step()
            assert abs(float(found) - loss) < 1e-6
            found_norm = engine.get_global_grad_norm()
            assert found_norm is not None
            assert abs(found_norm - norm) < 1e-6 * max(1.0, norm)
        engine.destroy()
    with pytest.raises(PlanError, match=r"autotp_size: Transformer brings no plan of tensor parallelism"):
        zeroshard.initialize(model=build(), config={**BASE, "tensor_parallel": {"autotp_size": 2}})
    with pytest.raises(PlanError, match=r"autotp_size 3 does not divide the 2 ranks that run"):
        zeroshard.initialize(model=build(), config={**BASE, "tensor_parallel": {"autotp_size": 3}})
    planned = build()
    vars(planned)["tp_plan"] = {"blocks.*.mlp.up": "colwise"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None)  # an older one has no such file
        with pytest.raises(PlanError, match=r"autotp_size: .* is applied by transformers 5.24 or later"):
            zeroshard.initialize(model=planned, config={**BASE, "tensor_parallel": {"autotp_size": 2}})
    wrong = {"layer_specs": [{"patterns": [".*"], "shape": [2, -1]}]}
    section = {"autotp_size": 2, "partition_config": wrong}
    with pytest.raises(PlanError, match=r"layer_specs\[0\] has shape: patterns and partition_type"):
        zeroshard.initialize(model=build(), config={**BASE, "tensor_parallel": section})


def test_a_config_names_the_layers_to_divide() -> None:
    run_ranks(2, _by_config)

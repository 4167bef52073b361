"""Pipeline stages, each a mesh of its own for ZeRO: their losses, norms and parameters equal one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.parallel_model import assert_close, whole_state
from tests.support.pipeline_model import (
    Layout,
    in_one_process,
    sharded,
    train,
    whole_model,
)
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zeroshard.engine.saving.weights_file import save_16bit_model
from zeroshard.errors import CheckpointError, NonFiniteError, PlanError, UsageError

WHOLE_MATRIX = os.environ.get("ZEROSHARD_ALL_MESHES") == "1"
SHAPES = [(2, 1), (2, 2), (4, 1), (4, 2)] if WHOLE_MATRIX else [(2, 2)]


def _layouts(stages: int, data: int) -> list[Layout]:
    if WHOLE_MATRIX:
        return [Layout(stages, data, stage, tied) for stage in range(4) for tied in (False, True)]
    return [Layout(stages, data, 1, tied=True), Layout(stages, data, 3, tied=True), Layout(stages, data, 2)]


def _trains(rank: int, world: int, layouts: list[Layout]) -> None:
    for layout in layouts:
        model, optimizer, mesh = sharded(layout)
        found = train(model, optimizer, layout, mesh, range(3))
        state = zeroshard.full_state_dict(model)
        wanted, parameters = in_one_process(layout.data, tied=layout.tied)
        own = {name: value for name, value in parameters.items() if name in dict(model.named_parameters())}
        assert own
        assert_close((found, state if state else {}), (wanted, own), layout)
        zeroshard.close(model)


@pytest.mark.parametrize(("stages", "data"), SHAPES)
def test_stages_train_as_one_process_does(stages: int, data: int) -> None:
    run_ranks(stages * data, _trains, _layouts(stages, data), timeout=300)


def _bits(rank: int, world: int, stage: int) -> None:
    """Sums are made in the order of one process, which has all layers: without clipping, norms decide nothing."""
    model, optimizer, mesh = sharded(Layout(world, 1, stage), clip_norm=0.0)
    train(model, optimizer, Layout(world, 1, stage), mesh, range(3))
    own = whole_state(model)
    _, wanted = in_one_process(1, tied=False, clip=float("inf"))
    held = [name for name in wanted if name in own]
    assert any(name.endswith(".exp_avg_sq") for name in held)
    for name in held:
        assert torch.equal(own[name], wanted[name]), f"stage {stage}: {name}"


def test_with_one_data_rank_stages_equal_one_process_bit_for_bit() -> None:
    run_ranks(2, _bits, 2)


def _moves(rank: int, world: int, folder: str, layouts: list[Layout]) -> None:
    """Every layout's checkpoint, loaded in every other and saved again, holds the same tensors."""
    for number, layout in enumerate(layouts):
        model, optimizer, mesh = sharded(layout)
        train(model, optimizer, layout, mesh, range(number, number + 1))
        zeroshard.save(model, folder, f"from-{number}", background=number == 0)
        zeroshard.wait_for_checkpoint(model)
        zeroshard.close(model)
        for place, other in enumerate(layouts):
            model, _, _ = sharded(other)
            zeroshard.load(model, folder, f"from-{number}")
            zeroshard.save(model, folder, f"again-{number}-{place}")
            zeroshard.close(model)
            tags = (f"from-{number}", f"again-{number}-{place}")
            saved, again = (CheckpointReader(Path(folder) / tag) for tag in tags)
            assert saved.manifest.tensors.keys() == again.manifest.tensors.keys()
            assert len(saved.manifest.tensors) > 30
            for name in saved.manifest.tensors if rank == 0 else ():
                assert torch.equal(saved.tensor(name).read(), again.tensor(name).read()), f"{layout} in {other}: {name}"
            saved.close()
            again.close()


def test_a_checkpoint_loads_in_any_other_layout(tmp_path: Path) -> None:
    layouts = [Layout(2, 2, 3), Layout(4, 1, 1), Layout(1, 4, 2)]
    if WHOLE_MATRIX:
        layouts = [Layout(*shape, stage) for shape in ((4, 1), (2, 2), (1, 4)) for stage in range(4)]
    run_ranks(4, _moves, str(tmp_path / "plain"), layouts, timeout=300)
    if WHOLE_MATRIX:
        tied = [Layout(2, 2, 3, tied=True), Layout(4, 1, 1, tied=True)]
        run_ranks(4, _moves, str(tmp_path / "tied"), tied, timeout=300)


def _exports(rank: int, world: int, folder: str) -> None:
    layout = Layout(2, 1, 3)
    model, optimizer, mesh = sharded(layout)
    train(model, optimizer, layout, mesh, range(1))
    with pytest.raises(UsageError, match="no rank sees the weights of all stages"):
        save_16bit_model(model, folder, "model.safetensors")
    zeroshard.save(model, folder, "last")
    own = zeroshard.full_state_dict(model)
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    whole_model(tied=False).load_state_dict(found)
    assert own
    assert all(torch.equal(found[name], value) for name, value in own.items())


def test_weights_are_exported_whole(tmp_path: Path) -> None:
    run_ranks(2, _exports, str(tmp_path))


def _skips(rank: int, world: int) -> None:
    layout = Layout(2, 1, 2)
    model, optimizer, mesh = sharded(layout)
    before = zeroshard.full_state_dict(model)
    if rank == 1:
        next(p for n, p in model.named_parameters() if n == "norm.weight").register_hook(lambda g: g * float("inf"))
    with pytest.raises(NonFiniteError, match=r"first in norm.weight"):
        train(model, optimizer, layout, mesh, range(1))
    after = zeroshard.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_that_is_not_finite_on_one_stage_is_named_and_stops_the_step_on_all() -> None:
    run_ranks(2, _skips)


def _refuses(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp_shard"))
    with pytest.raises(PlanError, match=r"parameter '0.weight' is on pipeline stages 0 and 1"):
        zeroshard.shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh)
    with pytest.raises(PlanError, match=r"tied module '0' is not the same .* stage 0 has 0.weight \[2, 2\]"):
        zeroshard.shard(nn.Sequential(nn.Linear(2, 2 + rank)), mesh=mesh, tied=["0"])
    with pytest.raises(PlanError, match=r"plan='auto' is not supported with pipeline stages"):
        zeroshard.shard(nn.Linear(2, 2), mesh=mesh, plan="auto")
    both = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("pp", "dp_shard", "tp"))
    model, _ = zeroshard.shard(nn.ModuleDict({str(rank): nn.Linear(2, 2)}), mesh=both)
    zeroshard.close(model)
    layers = nn.ModuleDict({str(rank): nn.Linear(2, 2)})
    groups: list[dict[str, Any]] = [{"params": [p]} for p in layers.parameters()]
    kinds = groups if rank == 0 else [{"params": list(layers.parameters())}]
    model, _ = zeroshard.shard(layers, torch.optim.AdamW(kinds, lr=1e-3), mesh=mesh)
    with pytest.raises(CheckpointError, match=r"have 2, 1 parameter groups"):
        zeroshard.save(model, "nowhere", "tag")
    zeroshard.close(model)
    dist.barrier()


def test_what_can_not_be_is_refused_on_all_stages() -> None:
    run_ranks(2, _refuses)

"""A model that ranks built with other values is that of the first rank, also where each rank keeps a part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.expert_model import EVEN
from tests.support.expert_model import build as build_experts
from tests.support.parallel_model import Transformer, build
from zeroshard.errors import PlanError
from zeroshard.plan.builder import Recipe
from zeroshard.plan.placement import STAGES

LAYERS = {
    "layer_specs": [
        {"patterns": [r".*\.(q|k|v)\.weight", r".*\.up\.weight"], "partition_type": "column"},
        {"patterns": [r".*\.(o|down)\.weight"], "partition_type": "row"},
    ]
}


def _with_values_of(rank: int, model: nn.Module) -> nn.Module:
    """The model as a script makes it that reads a checkpoint on rank 0, or that sets no seed."""
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def _of_rank_0(make: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in _with_values_of(0, make()).named_parameters()}


def _same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in wanted.items())


def _layers(rank: int, world: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "tensor_parallel": {"autotp_size": 2, "partition_config": LAYERS},
    }
    engine, *_ = zeroshard.initialize(model=_with_values_of(rank, build()), config=config)
    found = zeroshard.full_state_dict(engine.module)  # empty on the other ranks
    assert rank or _same(found, _of_rank_0(build))


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_divided_by_a_config_are_parts_of_rank_0s(ranks: int) -> None:
    run_ranks(ranks, _layers)


def _experts(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp_shard", "ep"))
    model = _with_values_of(rank, build_experts(EVEN))
    model, _ = zeroshard.shard(model, None, plan=Recipe(STAGES[1]), mesh=mesh)
    found = zeroshard.full_state_dict(model)
    assert rank or _same(found, _of_rank_0(lambda: build_experts(EVEN)))


def test_divided_experts_are_those_of_rank_0() -> None:
    run_ranks(2, _experts)


class _Wider(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


def _other_models(rank: int, world: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2, "partition_config": LAYERS}}
    with pytest.raises(PlanError, match="built other models"):
        zeroshard.initialize(model=_Wider() if rank else build(), config=config)


def test_ranks_that_built_other_models_are_refused() -> None:
    run_ranks(2, _other_models)

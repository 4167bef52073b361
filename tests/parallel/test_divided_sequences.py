"""Axes whose ranks have other parts of the same sequences: gradients are summed over data and sequence together."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.gathering_model import gathering
from tests.support.measure import held_bytes
from tests.support.one_process import CLIP, Step, alone
from tests.support.parallel_model import (
    BATCH,
    LENGTH,
    WIDTH,
    Mlp,
    assert_close,
    build,
    in_one_process,
    loss_of,
    loss_of_part,
    tokens,
    train,
)
from zeroshard.errors import PlanError
from zeroshard.plan.memory import state_bytes

WHOLE_MATRIX = os.environ.get("ZEROSHARD_ALL_MESHES") == "1"
CASES = [(1, 2, "sp"), (2, 2, "cp")] if WHOLE_MATRIX else [(2, 2, "cp")]


def _trains(rank: int, world: int, data: int, parts: int, axis: str) -> None:
    wanted = in_one_process(data)
    mesh = init_device_mesh("cpu", (data, parts), mesh_dim_names=("dp_shard", axis))
    place, group = mesh.get_local_rank(axis), mesh.get_group(axis)
    window = slice(place * (LENGTH // parts), (place + 1) * (LENGTH // parts))
    for stage in range(4) if WHOLE_MATRIX else (3,):
        model = gathering(build(), group, place)
        model, optimizer = zeroshard.shard(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan=stage, mesh=mesh, clip_norm=CLIP
        )
        found = train(model, optimizer, rank // parts, range(3), loss_of_part(window))
        plan = zeroshard.plan_of(model)
        assert held_bytes(model).total == state_bytes(plan).total
        assert plan.dp == data
        assert all(group.layout.shards == world for _, group in plan.groups())
        assert_close((found, zeroshard.full_state_dict(model)), wanted, (data, parts, axis, stage))
        zeroshard.close(model)


@pytest.mark.parametrize(("data", "parts", "axis"), CASES)
def test_divided_sequences_train_as_one_process_does(data: int, parts: int, axis: str) -> None:
    run_ranks(data * parts, _trains, data, parts, axis, timeout=300)


class WithoutAttention(nn.Module):
    """A model that sees each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mlp, self.head = nn.Embedding(16, WIDTH), Mlp(), nn.Linear(WIDTH, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(self.embedding(tokens)))


def _cut_by_torch(rank: int, world: int) -> None:
    """torch's `context_parallel` cuts the buffers; torch has no kernel of attention for it on a processor."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "cp"))
    torch.manual_seed(0)
    whole = WithoutAttention()
    model = copy.deepcopy(whole)
    model, optimizer = zeroshard.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan=3, mesh=mesh, clip_norm=CLIP
    )

    wanted = alone(whole, lambda model, step: [loss_of(model, tokens(step, 0))], 2)
    found: list[Step] = []
    for step in range(2):
        batch = tokens(step, 0)
        inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        expected = [inputs.chunk(4, dim=1)[index].clone() for index in ((0, 3) if rank == 0 else (1, 2))]
        with context_parallel(mesh["cp"], buffers=[inputs, labels], buffer_seq_dims=[1, 1]):
            assert torch.equal(inputs, torch.cat(expected, dim=1))  # the first and the last part, or two in the middle
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append((float(mean) / world, zeroshard.get_global_grad_norm(model) or 0.0))
    assert_close((found, zeroshard.full_state_dict(model)), wanted, "cut by torch")


def test_buffers_that_context_parallel_cuts_train_as_whole_ones() -> None:
    run_ranks(2, _cut_by_torch)


def _counts(rank: int, world: int) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
    }
    data = torch.utils.data.TensorDataset(torch.arange(8))
    engine, _, loader, _ = zeroshard.initialize(
        model=nn.Linear(4, 4), config=config, mesh_param=(1, 2), training_data=data
    )
    assert engine.train_batch_size() == BATCH
    assert loader is not None
    read = torch.stack([batch[0] for batch in loader])
    others = [torch.zeros_like(read) for _ in range(world)]
    dist.all_gather(others, read)
    assert torch.equal(others[0], others[1])
    outer = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "dp_shard"))
    with pytest.raises(PlanError, match="must come after the data axes"):
        zeroshard.shard(nn.Linear(4, 4), mesh=outer)


def test_batches_count_data_ranks_alone() -> None:
    run_ranks(2, _counts)

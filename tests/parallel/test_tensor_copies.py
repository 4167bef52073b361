"""What the ranks of an axis of tensor parallelism must have alike is compared: batches, and gradients of copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.parallel_model import WIDTH, Layout, loss_of, sharded, tokens
from zeroshard.errors import NonFiniteError, UsageError

OTHER_BATCHES = r"step\(\): the 2 ranks of a 'tp' group were given different batches"
OTHER_GRADIENTS = r"parameter 'norm.weight' is whole on all 2 ranks of a 'tp' group, but its gradient differs \(norms "


def _other_batches(rank: int, world: int, stage: int) -> None:
    """Every rank, also of a group whose ranks agree, gets the sentence."""
    model, optimizer = sharded(Layout(world // 2, 2, stage))
    loss_of(model, tokens(0, rank if rank < 2 else 2)).backward()
    expected = OTHER_BATCHES if rank < 2 else r"step\(\): rank \d and others of its 'tp' group differ"
    with pytest.raises(UsageError, match=expected):
        optimizer.step()


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 3), (4, 1)])
def test_ranks_of_an_axis_with_different_batches_are_refused(world: int, stage: int) -> None:
    run_ranks(world, _other_batches, stage)


def _some_steps_later(rank: int, world: int) -> None:
    """A sampler that goes other ways in the second epoch, say; what an evaluation reads is not compared."""
    model, optimizer = sharded(Layout(1, 2, 1))
    for step in range(2):
        model.eval()
        loss_of(model, tokens(step, rank))
        model.train()
        loss_of(model, tokens(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, tokens(2, rank)).backward()
    with pytest.raises(UsageError, match=OTHER_BATCHES):
        zeroshard.clip_grad_norm_(model, 1.0)


def test_batches_that_part_in_a_later_step_are_refused() -> None:
    run_ranks(2, _some_steps_later)


class Normed(nn.Module):
    """Each rank has some of the heads, and the norm of all of them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.norm(self.up(x).unflatten(-1, (-1, 4)))).flatten(-2))


def _batches(rank: int, numbers: bool) -> Iterator[torch.Tensor]:
    yield torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank if numbers else 0))


def _partial(rank: int, world: int, stage: int, micro_batches: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    model = parallelize_module(Normed(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    options: dict[str, Any] = {"plan": stage, "accumulate": micro_batches > 1}
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), mesh=mesh, **options)
    for _ in range(micro_batches):
        model(next(_batches(rank, numbers=False))).square().mean().backward()
    with pytest.raises(UsageError, match=OTHER_GRADIENTS):
        optimizer.step()


@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 1), (3, 2)])
def test_a_copy_whose_gradient_nobody_sums_is_refused(stage: int, micro_batches: int) -> None:
    run_ranks(2, _partial, stage, micro_batches)


def _other_values(rank: int, world: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), mesh=mesh)
    model(next(_batches(rank, numbers=True))).square().mean().backward()
    with pytest.raises(UsageError, match=OTHER_BATCHES):
        optimizer.step()


def test_different_batches_of_fractions_are_refused() -> None:
    run_ranks(2, _other_values)


def _infinite(rank: int, world: int) -> None:
    """Steps with infinite gradients tell nothing, so they do not count among those that are compared."""
    model, optimizer = sharded(Layout(1, 2, 1))
    for _ in range(4):
        (loss_of(model, tokens(0, 0)) * float("inf")).backward()
        with pytest.raises(NonFiniteError):
            optimizer.step()
        optimizer.zero_grad()
    loss_of(model, tokens(2, rank)).backward()
    with pytest.raises(UsageError, match=OTHER_BATCHES):
        optimizer.step()


def test_steps_that_overflow_are_not_counted() -> None:
    run_ranks(2, _infinite)

"""A small transformer in pipeline stages, run by torch's own schedules, and the same in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard
from tests.support.one_process import CLIP, State, Step, alone
from tests.support.parallel_model import build, tokens

MICRO = 4
"""Micro-batches of a step."""
_LAYERS = ("embedding", "blocks.0", "blocks.1", "head")


@dataclass(frozen=True)
class Layout:
    """How ranks are divided, and what ZeRO does in each stage; `tied` reads the head from the embedding."""

    stages: int
    data: int
    stage: int
    tied: bool = False

    def __str__(self) -> str:
        return f"pp {self.stages} x dp {self.data}, stage {self.stage}{', tied' if self.tied else ''}"

    @property
    def ranks(self) -> int:
        return self.stages * self.data


class Part(nn.Module):
    """Consecutive layers of the transformer, under the names that they have in the whole."""

    def __init__(self, first: int, last: int, *, tied: bool) -> None:
        super().__init__()
        whole = build()
        self._names = _LAYERS[first:last]
        self.blocks = nn.ModuleDict({str(i): b for i, b in enumerate(whole.blocks) if f"blocks.{i}" in self._names})
        if "embedding" in self._names or (tied and "head" in self._names):
            self.embedding = whole.embedding
        if "head" in self._names:
            self.norm, self.head = whole.norm, None if tied else whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "embedding" in self._names:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        if "head" in self._names:
            x = self.norm(x)
            x = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        return x


def whole_model(*, tied: bool) -> Part:
    return Part(0, len(_LAYERS), tied=tied)


def batch_of(step: int, data: int, micro: int) -> torch.Tensor:
    return tokens(step * MICRO + micro, data)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten()) / MICRO


def in_one_process(data_ranks: int, *, tied: bool, steps: int = 3, clip: float = CLIP) -> tuple[list[Step], State]:
    """Losses, norms and parameters of a run on all data in one process, without zeroshard."""

    def losses(model: nn.Module, step: int) -> Iterator[torch.Tensor]:
        for micro in range(MICRO):
            batches = [batch_of(step, data, micro) for data in range(data_ranks)]
            yield torch.stack([loss_of(model(batch[:, :-1]), batch[:, 1:]) for batch in batches]).mean()

    return alone(whole_model(tied=tied), losses, steps, clip=clip)


def sharded(layout: Layout, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, DeviceMesh]:
    """This rank's stage in a layout."""
    mesh = init_device_mesh("cpu", (layout.stages, layout.data), mesh_dim_names=("pp", "dp_shard"))
    place, each = mesh.get_local_rank("pp"), len(_LAYERS) // layout.stages
    model = Part(place * each, (place + 1) * each, tied=layout.tied)
    holds = layout.tied and layout.stages > 1 and place in (0, layout.stages - 1)
    given: dict[str, Any] = {"plan": layout.stage, "clip_norm": CLIP, "accumulate": True, **options}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return *zeroshard.shard(model, optimizer, mesh=mesh, tied=["embedding"] if holds else [], **given), mesh


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout, mesh: DeviceMesh, steps: range
) -> list[Step]:
    """Losses and norms as one process would see them; torch's 1F1B runs the micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    place, data = mesh.get_local_rank("pp"), mesh.get_local_rank("dp_shard")
    stage = PipelineStage(model, place, layout.stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=loss_of, scale_grads=False)
    found: list[Step] = []
    for step in steps:
        batch = torch.cat([batch_of(step, data, micro) for micro in range(MICRO)])
        losses: list[torch.Tensor] = []
        args = (batch[:, :-1],) if stage.is_first else ()
        target = batch[:, 1:] if stage.is_last else None
        schedule.step(*args, target=target, losses=losses if stage.is_last else None, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.tensor(float(sum(loss.detach() for loss in losses)) / layout.data)
        dist.all_reduce(total)
        norm = zeroshard.get_global_grad_norm(model)
        assert norm is not None
        found.append((float(total), norm))
    return found

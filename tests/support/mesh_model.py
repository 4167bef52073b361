"""A small transformer on any mesh: layers over `pp`, sequences over `cp`, `sp`, experts over `ep`, weights over `tp`.

    blocks.0    attention, mlp                 the mlp and all attention over tp
    blocks.1    attention, experts             the experts over ep

One process trains it on the data of all ranks, micro-batch after micro-batch, as every mesh does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard
from tests.support.expert_model import EVEN, ExpertLayer
from tests.support.gathering_model import gathering
from tests.support.one_process import CLIP, State, Step, alone
from tests.support.parallel_model import HEADS, LENGTH, Transformer, tokens

MICRO = 4
"""Micro-batches of a step."""
EPS = 1e-5
"""Of AdamW, which divides gradients by their own size: one in which samples cancel to 1e-9 is rounding, and with the
usual 1e-8 its update tells which way it was rounded."""
NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "ep", "tp")
_LAYERS = ("embedding", "blocks.0", "blocks.1", "head")


@dataclass(frozen=True)
class Layout:
    """How ranks are divided, and what ZeRO does on them.

    Attributes:
        sequence: ranks of `cp`, whose keys are gathered.
        heads: ranks of `sp`, who exchange parts of a sequence for heads.
    """

    stages: int = 1
    replicas: int = 1
    data: int = 1
    sequence: int = 1
    experts: int = 1
    tensor: int = 1
    stage: int = 0
    heads: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.stages, self.replicas, self.data, self.sequence, self.heads, self.experts, self.tensor)

    def mesh(self) -> DeviceMesh:
        """The axes of several ranks; made by all ranks."""
        several = {name: size for name, size in zip(NAMES, self.sizes, strict=True) if size > 1 or name == "dp_shard"}
        return init_device_mesh("cpu", tuple(several.values()), mesh_dim_names=tuple(several))

    @property
    def ranks(self) -> int:
        total = 1
        for size in self.sizes:
            total *= size
        return total

    @property
    def readers(self) -> int:
        """Ranks that read different data."""
        return self.replicas * self.data * self.experts

    def __str__(self) -> str:
        several = (f"{name} {size}" for name, size in zip(NAMES, self.sizes, strict=True) if size > 1)
        return f"{' x '.join(several) or 'one rank'}, stage {self.stage}"


def layouts(ranks: int) -> Iterator[Layout]:
    """Every mesh of so many ranks on which the small model can be divided."""
    sizes = (1, 2, 4)
    for stages, sequence, heads, experts, tensor in itertools.product(sizes, repeat=5):
        data, rest = divmod(ranks, stages * sequence * heads * experts * tensor)
        if rest or not data or heads * tensor > HEADS:
            continue
        for replicas in (1, 2) if data % 2 == 0 else (1,):
            yield Layout(stages, replicas, data // replicas, sequence, experts, tensor, heads=heads)


def build() -> Transformer:
    """The same model in every process."""
    torch.manual_seed(0)
    model = Transformer()
    model.blocks[1].mlp = ExpertLayer(EVEN)  # pyright: ignore[reportAttributeAccessIssue]
    return model


class Part(nn.Module):
    """Consecutive layers of a model, under the names that they have in the whole."""

    def __init__(self, whole: Transformer, first: int, last: int) -> None:
        super().__init__()
        self._names = _LAYERS[first:last]
        self.blocks = nn.ModuleDict({str(i): b for i, b in enumerate(whole.blocks) if f"blocks.{i}" in self._names})
        if "embedding" in self._names:
            self.embedding = whole.embedding
        if "head" in self._names:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "embedding" in self._names:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if "head" in self._names else x


def divide(model: nn.Module, axis: DeviceMesh) -> None:
    """Weights over an axis of tensor parallelism, in the way of Megatron; experts stay whole."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    plan |= {"head": ColwiseParallel(output_layouts=Replicate())}
    plan |= {"blocks.0.mlp.up": ColwiseParallel(), "blocks.0.mlp.down": RowwiseParallel()}
    for index in range(2):
        plan |= {f"blocks.{index}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"blocks.{index}.attention.o": RowwiseParallel()}
    present = {name for name, _ in model.named_modules()}
    parallelize_module(model, axis, {path: style for path, style in plan.items() if path in present})


@dataclass
class Run:
    """This rank's part of the model in a layout, under training."""

    layout: Layout
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any = None

    @staticmethod
    def start(layout: Layout, **options: Any) -> Run:
        """Made by all ranks."""
        mesh = layout.mesh()
        whole: Any = build()
        if layout.sequence * layout.heads > 1:
            whole = gathering(whole, _group(mesh, "cp"), _place(mesh, "cp"), _group(mesh, "sp"))
        place, each = _place(mesh, "pp"), len(_LAYERS) // layout.stages
        model = Part(whole, place * each, (place + 1) * each)
        if layout.tensor > 1:
            divide(model, mesh["tp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
        given: dict[str, Any] = {"plan": layout.stage, "clip_norm": CLIP, "accumulate": True, **options}
        model, sharded = zeroshard.shard(model, optimizer, mesh=mesh, **given)
        return Run(layout, mesh, model, sharded, _schedule(layout, mesh, model))

    def train(self, steps: range) -> list[Step]:
        """Losses and norms as one process would see them."""
        found: list[Step] = []
        for step in steps:
            total = torch.tensor(self._step([self._part(batch) for batch in self._batches(step)]))
            self.optimizer.step()
            self.optimizer.zero_grad()
            dist.all_reduce(total)
            norm = zeroshard.get_global_grad_norm(self.model)
            assert norm is not None
            found.append((float(total) * self.layout.stages / self.layout.ranks, norm))
        return found

    def close(self) -> None:
        zeroshard.close(self.model)

    def _step(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Forward and backward of all micro-batches; this rank's mean loss, where it computes one."""
        if self.schedule is None:
            total = 0.0
            for inputs, labels in parts:
                loss = loss_of(self.model(inputs), labels)
                loss.backward()
                total += float(loss.detach())
            return total
        stage, schedule = self.schedule
        found: list[torch.Tensor] = []
        inputs, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        target = labels if stage.is_last else None
        args = (inputs,) if stage.is_first else ()
        schedule.step(*args, target=target, losses=found if stage.is_last else None, return_outputs=False)
        return float(sum(loss.detach() for loss in found))

    def _batches(self, step: int) -> list[torch.Tensor]:
        layout, reader = self.layout, 0
        for name, size in (("dp_replicate", layout.replicas), ("dp_shard", layout.data), ("ep", layout.experts)):
            reader = reader * size + _place(self.mesh, name)
        return [batch_of(step, reader, micro) for micro in range(MICRO)]

    def _part(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels of this rank's part of the sequences."""
        each = LENGTH // (self.layout.sequence * self.layout.heads)
        begin = (_place(self.mesh, "cp") * self.layout.heads + _place(self.mesh, "sp")) * each
        return batch[:, :-1][:, begin : begin + each], batch[:, 1:][:, begin : begin + each]


def _place(mesh: DeviceMesh, name: str) -> int:
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh.get_local_rank(name) if name in names else 0


def _group(mesh: DeviceMesh, name: str) -> dist.ProcessGroup | None:
    return mesh.get_group(name) if name in (mesh.mesh_dim_names or ()) else None


def _schedule(layout: Layout, mesh: DeviceMesh, model: nn.Module) -> Any:
    if layout.stages == 1:
        return None
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    place = _place(mesh, "pp")
    stage = PipelineStage(model, place, layout.stages, torch.device("cpu"), group=mesh.get_group("pp"))
    return stage, Schedule1F1B(stage, MICRO, loss_fn=loss_of, scale_grads=False)


def batch_of(step: int, reader: int, micro: int) -> torch.Tensor:
    return tokens(step * MICRO + micro, reader)


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten()) / MICRO


def in_one_process(readers: int, steps: int = 3) -> tuple[list[Step], State]:
    """Losses, norms and parameters of a run on the data of so many ranks, without zeroshard."""

    def losses(model: nn.Module, step: int) -> Iterator[torch.Tensor]:
        for micro in range(MICRO):
            batches = [batch_of(step, reader, micro) for reader in range(readers)]
            yield torch.stack([loss_of(model(batch[:, :-1]), batch[:, 1:]) for batch in batches]).mean()

    return alone(build(), losses, steps, eps=EPS)

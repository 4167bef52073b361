"""One rank of slow_links: trains a row of Linears in bf16 and says how long a step takes, and what crosses the link.

The model computes next to nothing (a few samples), so that the link is what a step waits for. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zeroshard
from zeroshard.mesh import REPLICATE
from zeroshard.plan.placement import DIFFERENCE_CODES, GATHER_CODES
from zeroshard.plan.plan import Plan
from zeroshard.plan.traffic import traffic_by_axes

NODES, SAMPLES, WARM_UP = 2, 4, 3


class Layer(nn.Module):
    """A Linear with a way around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Layers(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", nargs="+", required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {way: measured(way, options.width, options.layers, options.steps) for way in options.ways}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measured(way: str, width: int, layers: int, steps: int) -> dict[str, float]:
    """Seconds of a step of one way, bytes over the link in each direction, and the model's size."""
    torch.manual_seed(0)
    model = Layers(width, layers)
    numel = sum(parameter.numel() for parameter in model.parameters())
    step, link = hsdp(model, numel) if way == "fsdp2-hsdp" else engine(model, way)
    seconds = [timed(step, width) for _ in range(WARM_UP + steps)][WARM_UP:]
    slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if way != "fsdp2-hsdp":
        zeroshard.close(model)
    return {"seconds": float(slowest), "link_bytes": link, "parameters": numel}


def timed(step: Callable[[torch.Tensor], None], width: int) -> float:
    """Seconds of a step, from and to a point that all ranks have reached."""
    batch = torch.randn(SAMPLES, width).bfloat16()
    dist.barrier()
    began = time.perf_counter()
    step(batch)
    dist.barrier()
    return time.perf_counter() - began


def engine(model: nn.Module, way: str) -> tuple[Callable[[torch.Tensor], None], float]:
    """zeroshard, and the bytes that cross the link in each direction."""
    world = dist.get_world_size()
    mesh = zeroshard.Mesh.data_parallel(world, world if way == "zero3" else world // NODES)
    recipe = zeroshard.Recipe(
        sharding=zeroshard.STAGES[3].nested(mesh),
        precision=zeroshard.Precision(param="bfloat16"),
        policy=zeroshard.ExecutionPolicy(cast_inputs="bfloat16", prefetch=2, overlap_step=True),
    )
    if way in ("zero++", "differences"):
        recipe = replace(recipe, gradient_codes=zeroshard.GradientCodes())
        recipe = replace(recipe, **({"codes": GATHER_CODES} if way == "zero++" else {"differences": DIFFERENCE_CODES}))
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan=recipe, mesh=mesh)

    def step(batch: torch.Tensor) -> None:
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, link_bytes(zeroshard.plan_of(model))


def link_bytes(plan: Plan) -> float:
    """Bytes that leave a node in a step, as gloo sends them."""
    found, ranks = 0.0, plan.mesh.world_size
    for (kind, axes), (_, nbytes) in traffic_by_axes(plan).items():
        if REPLICATE not in axes and plan.mesh.size((REPLICATE,)) > 1:
            continue
        twice = 2 if kind in ("reduce-scatter", "all-reduce") else 1
        size = plan.mesh.size(axes)
        # Over all ranks in one ring the border is crossed once; else each rank of a node has a ring of its own.
        rings = 1 if size == ranks else ranks // NODES
        found += twice * nbytes * (size - 1) / size * rings
    return found


def hsdp(model: Layers, numel: int) -> tuple[Callable[[torch.Tensor], None], float]:
    """FSDP2 over a node, with copies on the other; the sum over copies is an all-reduce of a rank's part."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (NODES, world // NODES), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: torch.Tensor) -> None:
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, 2 * numel * 2 * (NODES - 1) / NODES


if __name__ == "__main__":
    main()

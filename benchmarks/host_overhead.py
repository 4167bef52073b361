"""Host overhead: how long a step takes when there is nearly nothing to compute.

    python benchmarks/host_overhead.py [--blocks 48] [--dim 48] [--pairs 15] [--steps 10] [--nproc 2] [--json FILE]

48 small residual blocks at stage 3 on two gloo ranks, against FSDP2 with `fully_shard` on each block. The matmuls take
microseconds, so the step is hooks, collectives and bookkeeping. Both models live in the same processes and are timed
in turn, `--steps` steps each, the order swapped from pair to pair: what disturbs the machine disturbs both. A figure
is the median over the pairs of the slowest rank; the ratio is the median of the pairs' ratios, not that of the medians.

Both run the same plain loop. FSDP2 gets torch's AdamW with foreach, its fastest on CPU DTensors. Every block is
gathered and reduced on both sides (no persistent parameters), and nothing is clipped. In the end both must have come
to the same loss: a fast step that computes something else counts for nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroshard

PHASES = ("forward", "backward", "optimizer", "step")
BATCH = 4
RATE = 1e-4
Step = Callable[[], tuple[list[float], float]]
"""Takes one training step and gives the seconds of forward, backward and optimizer, and the loss before it."""


class Block(nn.Module):
    """A residual multilayer perceptron, (batch, dim) to (batch, dim)."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks: int, dim: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.head = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def build(blocks: int, dim: int) -> Stack:
    torch.manual_seed(0)
    return Stack(blocks, dim)


def zeroshard_step(blocks: int, dim: int, x: torch.Tensor) -> Step:
    model = build(blocks, dim)
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE)
    sharded, optimizer = zeroshard.shard(model, adamw, plan=3)
    assert optimizer is not None
    return plain_loop(sharded, optimizer, x)


def fsdp2_step(blocks: int, dim: int, x: torch.Tensor) -> Step:
    model = build(blocks, dim)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_loop(model, torch.optim.AdamW(model.parameters(), lr=RATE, foreach=True), x)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Step:
    def step() -> tuple[list[float], float]:
        marks = [time.perf_counter()]
        loss = model(x)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        return [end - start for start, end in pairwise(marks)], float(loss.detach())

    return step


def measure(step: Step, steps: int) -> tuple[list[float], float]:
    """Milliseconds a step of each phase and of the whole, on the slowest rank, and the last loss."""
    dist.barrier()
    started = time.perf_counter()
    taken = [step() for _ in range(steps)]
    whole = time.perf_counter() - started
    sums = [sum(column) for column in zip(*(spans for spans, _ in taken), strict=True)]
    milliseconds = torch.tensor([*sums, whole], dtype=torch.float64) * 1000 / steps
    dist.all_reduce(milliseconds, op=dist.ReduceOp.MAX)
    return milliseconds.tolist(), taken[-1][1]


def compare(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By phase: the median of each contender in ms, and the median ratio of the pairs."""
    x = torch.randn(BATCH, args.dim, generator=torch.Generator().manual_seed(dist.get_rank()))
    contenders = [zeroshard_step(args.blocks, args.dim, x), fsdp2_step(args.blocks, args.dim, x)]
    for step in contenders:
        measure(step, args.warmup)
    pairs: list[tuple[list[float], list[float]]] = []
    for pair in range(args.pairs):
        times: list[list[float]] = [[], []]
        losses = [0.0, 0.0]
        for index in (0, 1) if pair % 2 == 0 else (1, 0):
            times[index], losses[index] = measure(contenders[index], args.steps)
        if not math.isclose(*losses, rel_tol=1e-3):
            raise SystemExit(f"the losses part: zeroshard {losses[0]}, FSDP2 {losses[1]}; the times mean nothing")
        pairs.append((times[0], times[1]))
    return {
        phase: {
            "zeroshard_ms": statistics.median(ours[i] for ours, _ in pairs),
            "fsdp2_ms": statistics.median(theirs[i] for _, theirs in pairs),
            "ratio": statistics.median(ours[i] / theirs[i] for ours, theirs in pairs),
        }
        for i, phase in enumerate(PHASES)
    }


def report(result: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    table = Table(title=f"{args.blocks} blocks of width {args.dim}, stage 3, {dist.get_world_size()} gloo ranks")
    for column in ("phase", "zeroshard ms", "FSDP2 ms", "ratio"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase, row in result.items():
        table.add_row(phase, f"{row['zeroshard_ms']:.2f}", f"{row['fsdp2_ms']:.2f}", f"{row['ratio']:.3f}")
    Console(width=100).print(table)
    if args.json is not None:
        setting = {name: value for name, value in vars(args).items() if name != "json"}
        machine = {"torch": torch.__version__, "machine": platform.processor() or platform.machine()}
        args.json.write_text(json.dumps({"setting": setting, **machine, "result": result}, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--dim", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps in each timing")
    parser.add_argument("--warmup", type=int, default=5, help="untimed steps of each before the first pair")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args()


def main() -> int:
    args = parse()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "zeroshard", "run", "--nproc", str(args.nproc), __file__, *sys.argv[1:]]
        return subprocess.run(command).returncode
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = compare(args)
    if dist.get_rank() == 0:
        report(result, args)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

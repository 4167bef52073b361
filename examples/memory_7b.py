"""What ZeRO's stages hold per rank for a model of 7 billion parameters, from the plan; no memory and no process group.

    python examples/memory_7b.py [--ranks 8]

The model is built on the meta device, so any other module can stand in its place. "state" is with gradients of 2 bytes,
one backward per step; "accumulating" is the state where gradients of several micro-batches are summed in fp32.
GB are 1e9 bytes. Padding is counted, which is why the last digit can differ from the formulas of the papers.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from torch import nn

import zeroshard
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.report import memory_table
from zeroshard.sharding.units import find_units

WIDTH, HIDDEN, BLOCKS, VOCABULARY = 4096, 11674, 32, 32000
"""Llama's shape, its inner width chosen so that the sum is 7.00e9 parameters."""


class Block(nn.Module):
    """The parameters of one decoder block; it is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mlp = nn.ModuleList(nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


def plan_for(model: nn.Module, stage: int, ranks: int, *, accumulate: bool) -> zeroshard.Plan:
    recipe = zeroshard.Recipe(
        sharding=zeroshard.STAGES[stage],
        precision=zeroshard.Precision(param="bfloat16"),
        policy=zeroshard.ExecutionPolicy(accumulate=accumulate),
    )
    return zeroshard.build_plan(find_units(model), recipe, ranks)


def stage_lines(model: nn.Module, ranks: int) -> list[str]:
    """GB of state per rank: a heading, then a line per stage."""
    lines = ["stage  param   grad  master  moments   state  slots  accumulating"]
    for stage in zeroshard.STAGES:
        held = state_bytes(plan_for(model, stage, ranks, accumulate=False))
        more = state_bytes(plan_for(model, stage, ranks, accumulate=True))
        sizes = (held.param, held.grad, held.master, held.moments, held.state, held.gather_slots + held.reduce_slots)
        widths = (6, 6, 7, 8, 7, 6, 13)
        cells = (f"{size / 1e9:{width}.2f}" for size, width in zip((*sizes, more.state), widths, strict=True))
        lines.append(f"{stage:5} " + " ".join(cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    with torch.device("meta"):
        model = Model()
    print("\n".join(stage_lines(model, args.ranks)), end="\n\n")
    Console().print(memory_table(plan_for(model, 3, args.ranks, accumulate=False)))


if __name__ == "__main__":
    main()

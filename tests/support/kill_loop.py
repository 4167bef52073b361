"""A child that trains, saves after each step, and is killed at some instant by its parent; see test_kills.

parent                        child rank 0 .. n-1
starts them   ---------->     load the newest checkpoint, or start; step; write "step loss"; save; step; ...
SIGKILL some rank at a random time
reads lines, looks at the newest checkpoint, starts the next ones
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zeroshard


def train(rank: int, world_size: int, base: str, store: str, steps: int, pace: float, key: str | None = None) -> None:
    """Go on from the newest checkpoint up to step `steps`; with a key checkpoints are encrypted."""
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "checkpoint": {"keep": 2, **({} if key is None else {"encryption_key": key})},
    }
    engine = zeroshard.initialize(model=model, config=config)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.load_checkpoint(base)
    with Path(base, f"log-{rank}").open("a", buffering=1) as log:
        while engine.global_steps < steps:
            step = engine.global_steps
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)) + torch.randn(()) * 0.1
            loss = (engine(x) - x).square().mean()
            engine.backward(loss)
            engine.step()
            log.write(f"{step} {float(loss.detach()).hex()}\n")
            engine.save_checkpoint(base, background=step % 2 == 1)
        engine.destroy()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    train(int(arguments[0]), int(arguments[1]), arguments[2], arguments[3], int(arguments[4]), 0.0)
    os._exit(0)

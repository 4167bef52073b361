"""Trains one model at stages 0 to 3 and prints what the README claims, measured: bits, bytes and traffic.

    zeroshard run --nproc 2 examples/check_claims.py

bits     a digest of all parameters after 20 steps of fp32 AdamW with clipping: one value for all stages
bytes    the storages of all live tensors of this process, less those from before, beside the plan's count
traffic  payload bytes that the process groups were given in the last step, beside the plan's count

It trains on CPUs, so that any machine runs it.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import time

import torch
from torch import nn

import zeroshard
from zeroshard.engine.core.handle import handle_of
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.traffic import step_traffic

STEPS = 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def live_bytes() -> int:
    """Bytes of the storages of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and not found.is_meta:
            storage = torch.Tensor.untyped_storage(found)
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def held_bytes(before: int, planned: int) -> int:
    """What is live beyond `before`. A gloo thread holds a tensor a moment longer than its collective takes."""
    deadline = time.monotonic() + 2.0
    while (held := live_bytes() - before) != planned and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(stage: int, rank: int, before: int) -> tuple[str, int, int, int, int]:
    """Digest of the parameters, bytes planned and measured beyond `before`, traffic planned and counted."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)))
    built = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recipe = zeroshard.Recipe(zeroshard.STAGES[stage], policy=zeroshard.ExecutionPolicy(clip_norm=0.5))
    model, optimizer = zeroshard.shard(model, built, plan=recipe, device=torch.device("cpu"))
    sent = handle_of(model).comm.sent
    for step in range(STEPS):
        zeroshard.drain(model)  # gathers for the next forward belong to the step before
        sent.reset_totals()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    zeroshard.drain(model)
    counted = sum(nbytes for _, nbytes in sent.totals().values())
    plan = zeroshard.plan_of(model)
    planned = state_bytes(plan).total
    measured = held_bytes(before, planned)
    digest = hashlib.sha256()
    for _, value in zeroshard.iterate_full_parameters(model):
        digest.update(value.numpy().tobytes())
    zeroshard.close(model)
    return digest.hexdigest()[:16], planned, measured, step_traffic(plan).total, counted


def main() -> int:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    lines = [
        f"{STEPS} steps on {torch.distributed.get_world_size()} ranks, fp32, AdamW, clipped".center(70).rstrip(),
        "stage        parameters  bytes: plan   measured  traffic: plan    counted",
    ]
    digests, exact, before = set(), True, live_bytes()
    for stage in zeroshard.STAGES:
        digest, planned, measured, foreseen, counted = train(stage, rank, before)
        digests.add(digest)
        exact = exact and planned == measured and foreseen == counted
        lines.append(f"{stage:5}  {digest} {planned:12,} {measured:10,} {foreseen:14,} {counted:10,}")
    if rank == 0:
        print("\n".join(lines))
    torch.distributed.destroy_process_group()
    return 0 if len(digests) == 1 and exact else 1


if __name__ == "__main__":
    sys.exit(main())

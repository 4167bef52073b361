"""The vertical schedule beside the usual order: one process, parameters and AdamW's state on disk.

    python -m benchmarks vertical [--path FOLDER] [--micro 4 8] [--gib 0.5] [--tokens 16] [--gbps RATE] [--json FILE]

A model of plain Linears in bf16 is trained with the same micro-batches in both orders, in turns, in one run: one after
the other, each of them bringing all parameters twice, and all of them through a layer before the next one. A step's
seconds are those from its first forward until its update is on disk; the medians of the rounds stand in the table, and
the ratio is the median of the ratios of the pairs. Bytes read are the plan's, of which tests show that they pass the
disk. With `--gbps` reads and writes take as long as they would on a disk of that rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from zeroshard.nvme.memory import NvmeMemory
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import disk_nbytes
from zeroshard.plan.traffic import disk_traffic
from zeroshard.tiers import Completion

WIDTH = 1024
NBYTES_PER_PARAMETER = 14
WARM_UP = 2


@dataclass(frozen=True)
class Row:
    """One number of micro-batches in both orders; seconds of a step, bytes that it reads for gathers."""

    micro: int
    usual_seconds: float
    vertical_seconds: float
    ratio: float
    usual_read: int
    vertical_read: int
    usual_device: int
    vertical_device: int


class SlowDisk(NvmeMemory):
    """Files whose transfers take as long as on a disk of `rate` bytes per second, one after the other."""

    def __init__(self, spill: zeroshard.Spill, nbytes: int, rate: float) -> None:
        super().__init__(spill, 0, nbytes)
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def read_blocks(self, at: int, address: int, nbytes: int) -> Completion:
        return self._not_before(super().read_blocks(at, address, nbytes), nbytes)

    def write_blocks(self, at: int, address: int, nbytes: int) -> Completion:
        return self._not_before(super().write_blocks(at, address, nbytes), nbytes)

    def _not_before(self, done: Completion, nbytes: int) -> Completion:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + nbytes / self._rate
            at = self._free

        def finish() -> None:
            done()
            time.sleep(max(0.0, at - time.monotonic()))

        return finish


class Trained:
    """A model in one of the orders, step by step."""

    def __init__(self, options: argparse.Namespace, micro: int, *, vertical: bool) -> None:
        spill = zeroshard.Spill((options.path,))
        tier = zeroshard.Tier.NVME
        recipe = zeroshard.Recipe(
            precision=zeroshard.Precision(param="bfloat16"),
            policy=zeroshard.ExecutionPolicy(cast_inputs="bfloat16", clip_norm=1.0),
            offload=zeroshard.Offload(param=True, tier=tier, param_tier=tier, spill=spill),
        )
        changes = {"micro_batches": micro} if vertical else {"accumulate": True}
        recipe = replace(recipe, policy=replace(recipe.policy, **changes))
        layers = max(2, int(options.gib * 2**30) // (NBYTES_PER_PARAMETER * WIDTH * WIDTH))
        with zeroshard.Init():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        rate = options.gbps
        slow = {tier: lambda plan, _: SlowDisk(spill, disk_nbytes(plan), rate * 1e9)} if rate else None
        self.model, self._optimizer = zeroshard.shard(
            model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan=recipe, tiers=slow
        )
        self._micro, self._tokens = micro, options.tokens
        self._schedule = zeroshard.VerticalSchedule(self.model, _loss) if vertical else None
        plan = zeroshard.plan_of(self.model)
        self.read, self.device = disk_traffic(plan, micro_batches=micro).gathered, state_bytes(plan).total

    def step(self) -> float:
        """The seconds of a step."""
        pairs = [(torch.randn(self._tokens, WIDTH), torch.zeros(self._tokens, WIDTH)) for _ in range(self._micro)]
        began = time.perf_counter()
        if self._schedule is not None:
            self._schedule.step(pairs)
        else:
            for inputs, labels in pairs:
                (_loss(self.model(inputs), labels) / self._micro).backward()
        self._optimizer.step()
        zeroshard.drain(self.model)
        took = time.perf_counter() - began
        self._optimizer.zero_grad()
        return took


def _loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), labels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=".", help="a folder on a disk")
    parser.add_argument("--micro", type=int, nargs="+", default=[4, 8], help="micro-batches of a step")
    parser.add_argument("--gib", type=float, default=0.5, help="size of parameters and state")
    parser.add_argument("--tokens", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gbps", type=float, help="let the disk be as slow as this many GB/s")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    slow = f", as slow as {options.gbps} GB/s" if options.gbps else ""
    print(f"{options.gib} GiB on disk{slow}, {options.tokens} rows a micro-batch, {os.cpu_count()} cores, {_torch()}")
    rows = [measured(options, micro, print) for micro in options.micro]
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


def measured(options: argparse.Namespace, micro: int, say: Callable[[str], None]) -> Row:
    """Both orders with so many micro-batches, in turns."""
    usual, vertical = (Trained(options, micro, vertical=one) for one in (False, True))
    pairs = [(usual.step(), vertical.step()) for _ in range(WARM_UP + options.rounds)][WARM_UP:]
    row = Row(
        micro,
        statistics.median(one for one, _ in pairs),
        statistics.median(other for _, other in pairs),
        statistics.median(one / other for one, other in pairs),
        usual.read,
        vertical.read,
        usual.device,
        vertical.device,
    )
    for one in (usual, vertical):
        zeroshard.close(one.model)
    say(
        f"  {micro} micro-batches: {row.usual_seconds:.2f} s in the usual order, {row.vertical_seconds:.2f} s "
        f"vertical: {row.ratio:.2f} times as fast; parameters read {row.usual_read / 2**30:.2f} and "
        f"{row.vertical_read / 2**30:.2f} GiB, on the device {row.usual_device / 2**20:.0f} and "
        f"{row.vertical_device / 2**20:.0f} MiB"
    )
    return row


def _torch() -> str:
    return f"torch {torch.__version__}"


if __name__ == "__main__":
    raise SystemExit(main())

"""Measures many configurations in the same processes, one after the other; one JSON line each from rank 0.

    python -m benchmarks.planner_ranks --cases FILE [--length 2048] [--steps 4] [--warmup 2]

Run by benchmarks.planner_measure, which writes FILE, a JSON list of cases, while the ranks are still joining. Starting
processes costs ten seconds a row, in which a GPU waits; here model and engine are built, measured, closed and dropped,
and `left_gib` says what stayed behind, so that one row can't spoil the peak of the next unseen.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engines import build, load
from benchmarks.planner_cases import ALL_MEMORY, Case
from benchmarks.setting import Setting
from benchmarks.train import batches, finish, memory, slowest, start, synchronize, timed, used, warmed_up

WAIT_SECONDS = 120.0
POLL_SECONDS = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4, help="steps between two syncs")
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    device = start()
    load("zeroshard3")
    dist.barrier()
    for case in read_cases(args.cases):
        row = measure(case, device, args)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()
    return 0


def read_cases(path: Path) -> list[Case]:
    """The cases of `path`, which comes into being whole."""
    began = time.monotonic()
    while not path.exists():
        if time.monotonic() - began > WAIT_SECONDS:
            raise SystemExit(f"no cases came in {WAIT_SECONDS:.0f} s: {path}")
        time.sleep(POLL_SECONDS)
    return [Case(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def measure(case: Case, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one case; nothing of its model is left when it returns."""
    began = time.perf_counter()
    row = train(case, device, args)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dist.barrier()
    left = slowest(memory(device, torch.cuda.memory_allocated, 0))
    return {**row, "left_gib": left, "seconds": round(time.perf_counter() - began, 1)}


def train(case: Case, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Build, warm up, time, close."""
    setting = Setting(
        engine=f"zeroshard{case.stage}",
        device=device,
        size=case.size,
        batch=case.samples,
        checkpointing=case.checkpointing,
        spare=ALL_MEMORY / 2**30 if case.tuned else 0.0,
        offload=case.offload,
    )
    began = time.perf_counter()
    trainer = build(setting)
    feed = batches(setting, args.length)
    synchronize(device)
    init_s, init = time.perf_counter() - began, memory(device, torch.cuda.memory_allocated, trainer.outside)
    found = timed(warmed_up(trainer, feed, device, args.warmup), device, args.steps, 1)
    row = {
        "case": vars(case),
        "step_s": found.steps[0],
        "host_s": found.host,
        "loss": round(found.loss, 4),
        "allocated_gib": slowest(memory(device, torch.cuda.max_memory_allocated, trainer.outside)),
        "reserved_gib": slowest(memory(device, torch.cuda.max_memory_reserved, trainer.outside)),
        "used_gib": slowest(memory(device, lambda: used(device), 0)),
        "peer_gib": memory(device, lambda: 0, trainer.outside),
        "init_gib": init,
        "init_s": round(init_s, 2),
    }
    finish(trainer, device)
    return row


if __name__ == "__main__":
    sys.exit(main())

"""State on disk: what our reader and writer reach beside plain direct I/O, and a step beside what that foretells.

    python -m benchmarks nvme [--path FOLDER ...] [--gib 3] [--rounds 5] [--json FILE]

First the rates: windows of 48 MiB by our reader and writer, beside preadv and pwritev of 16 MiB blocks by one thread
and by four (the better counts), in turns on the same files; medians of the rounds. Then steps: a model of plain Linears
whose AdamW state takes the given size is trained with all of it on disk, on the processor. An update's seconds, from
step() until the last window is on disk, stand beside the prediction: its bytes, read and written, over the rate of both
directions at once. That is measured before and after each step, for disks that others use too, and each time after the
disk has rested as long as it does in a step, for disks that are faster after a rest. What comes before the update
(forward and backward of one sample, and the norm of the gradients, which rest in host memory) is timed apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard
from zeroshard.nvme.measure import DiskPasses, DiskRates
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import disk_nbytes

WIDTH = 2048
NBYTES_PER_PARAMETER = 12
GOAL = 0.9
WARM_UP = 4
"""Steps in which blocks that were only reserved are written, and the engine looks whether parameters are changed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="append", help="a folder on a disk; several are striped over")
    parser.add_argument("--gib", type=float, default=3.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    paths, nbytes = options.path or ["."], int(options.gib * 2**30)
    passes = DiskPasses(paths, nbytes)
    rates = passes.rates(options.rounds)
    print_rates(rates, nbytes)
    steps = train(paths, nbytes, options.rounds, passes)
    print_steps(steps)
    if options.json is not None:
        options.json.write_text(json.dumps({"rates": vars(rates), "steps": steps}, indent=2) + "\n")
    passes.close()
    return 0


def train(paths: list[str], nbytes: int, rounds: int, passes: DiskPasses) -> dict[str, Any]:
    """Steps with state on disk, and between them what the disk gives in both directions."""
    layers = max(1, nbytes // (NBYTES_PER_PARAMETER * WIDTH * WIDTH))
    recipe = zeroshard.Recipe(
        precision=zeroshard.Precision(param="bfloat16"),
        policy=zeroshard.ExecutionPolicy(cast_inputs="bfloat16", clip_norm=1.0),
        offload=zeroshard.Offload(tier=zeroshard.Tier.NVME, spill=zeroshard.Spill(tuple(paths))),
    )
    with zeroshard.Init():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan=recipe)
    plan = zeroshard.plan_of(model)
    state = disk_nbytes(plan)
    after = both_rate(passes)
    predicted, measured, others = list[float](), list[float](), list[float]()
    for number in range(WARM_UP + rounds):
        began = time.perf_counter()
        model(torch.randn(1, WIDTH)).float().square().mean().backward()
        zeroshard.clip_grad_norm_(model, 1.0)
        compute = time.perf_counter() - began
        began = time.perf_counter()
        optimizer.step()
        zeroshard.drain(model)
        update = time.perf_counter() - began
        optimizer.zero_grad()
        time.sleep(compute)
        before, after = after, both_rate(passes)
        if number >= WARM_UP:
            predicted.append(2 * state / statistics.mean([before, after]))
            measured.append(update)
            others.append(compute)
    zeroshard.close(model)
    return {
        "parameters": layers * WIDTH * WIDTH,
        "disk_nbytes": state,
        "host_nbytes": state_bytes(plan).host,
        "peak_resident_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "forward_backward_seconds": others,
        "ratio": statistics.median(one / other for one, other in zip(measured, predicted, strict=True)),
    }


def both_rate(passes: DiskPasses) -> float:
    """Bytes per second of one pass in both directions."""
    began = time.perf_counter()
    return passes.both() / (time.perf_counter() - began)


def print_rates(rates: DiskRates, nbytes: int) -> None:
    """The rates, and whether the goal is reached."""
    print(f"{rates.name}, {nbytes / 2**30:.1f} GiB, {os.cpu_count()} cores, torch {torch.__version__}")
    rows = (("written", rates.written, rates.plain_written), ("read", rates.read, rates.plain_read))
    for what, ours, plain in rows:
        print(f"  {what:8} {ours / 1e9:.2f} GB/s, plain {plain / 1e9:.2f}: {ours / plain:.2f} of it (goal {GOAL})")
    print(f"  both     {rates.both / 1e9:.2f} GB/s, read and written at once")


def print_steps(steps: dict[str, Any]) -> None:
    """A step beside its prediction."""
    predicted, measured = (statistics.median(steps[f"{name}_seconds"]) for name in ("predicted", "measured"))
    before = statistics.median(steps["forward_backward_seconds"])
    disk, host = steps["disk_nbytes"] / 2**30, steps["host_nbytes"] / 2**30
    print(f"{steps['parameters'] / 1e6:.0f}e6 parameters, {disk:.2f} GiB on disk, {host:.2f} GiB in host memory")
    print(f"  an update takes {measured:.2f} s, {predicted:.2f} predicted; {steps['ratio']:.2f} of it, median of pairs")
    print(f"  forward, backward and norm before it {before:.2f} s")


if __name__ == "__main__":
    raise SystemExit(main())

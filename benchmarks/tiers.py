"""The largest models on one GPU: AdamW's state on the GPU, in host memory and on disk, in one step, beside its floors.

    python -m benchmarks tiers --path FOLDER [--size 20b] [--host-gib 128] [--disk-gib 60] [--budget 360] [--json FILE]
    python -m benchmarks tiers --path FOLDER --size 30b --bits 8                    moments in 8 bits, by torchao
    python -m benchmarks tiers --size tiny --length 64 --batch 1 --share 0.75 --kept-share 0.25     to try it on a CPU

In one run, on one machine, with a line for each phase and the seconds since the start:

    split         the least share of the state off the GPU for which the plan says that it fits, and of that as much in
                  host memory as `--host-gib` less `--keep-host` has room for; the rest is on disk
    disk          bytes per second that training's reader and writer reach in both directions at once: in a few GiB
                  before, and over all of the state's own files behind the last step, of which the floor is made
    memory        host memory is filled once where the machine says that it has too little (benchmarks.grow)
    compute       forward and backward alone, in bf16, of the same width and as many layers as fit; scaled to all
    steps         stage 3, bf16, activations checkpointed, global norm clipped to 1: `--warmup` steps, then `--steps`

A step's seconds are those from its first forward to the return of its `step()`, when the GPU is idle; its forward waits
for the update of the step before, so the first of them is no whole step. The last update is waited for by itself. The
disk floor is what a step reads and writes over the rate of both directions; the goal is 1.10 of the larger floor.
`--budget` ends the steps early. Host memory is the peak of the resident set, locked pages and libraries included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import largest
from benchmarks.engines import build, load
from benchmarks.grow import grow
from benchmarks.llama import SIZES, Llama, Shape
from benchmarks.planned import machine, planned
from benchmarks.setting import Setting, Trainer
from benchmarks.train import GIB, batches, host_peak, memory, start, synchronize
from zeroshard.engine.memory.host_memory import available_bytes
from zeroshard.errors import PlanError
from zeroshard.nvme.measure import DiskPasses
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.traffic import disk_traffic

GOAL = 1.10
FLOOR_LAYERS = (4, 12)
FLOOR_STEPS = 3
SPARE_NBYTES = 2 << 30
"""Of host memory, beside what the plan takes: the engine wants some left."""
CLOSING_SECONDS = 20.0
"""For what comes after the steps, besides their last update."""


class Clock:
    """Seconds since the start, and what is left of the budget."""

    def __init__(self, budget: float) -> None:
        self._began, self._budget = time.monotonic(), budget

    @property
    def left(self) -> float:
        return self._budget - (time.monotonic() - self._began)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


@dataclass(frozen=True)
class Steps:
    """Seconds of the timed steps and of those before them, and of the last update alone."""

    timed: list[float]
    before: list[float]
    update: float
    loss: float


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    clock = Clock(args.budget)
    device = start()
    assert dist.get_world_size() == 1, "this is about one GPU: run it without a launcher"
    setting = split(args, device, clock)
    rates = [disk_rate(args.path, args.probe_gib, clock)]
    compute = compute_floor(setting, clock)
    make_room(args, clock)
    row = train(setting, args, rates, compute, clock)
    print(table(row), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    return 0


def split(args: argparse.Namespace, device: torch.device, clock: Clock) -> Setting:
    """The setting with the shares that were asked for, or those with which the plan says that it fits.

    Raises:
        PlanError: it does not fit.
    """
    setting = Setting(
        "zeroshard3",
        device,
        size=args.size,
        batch=args.batch,
        length=args.length,
        checkpointing=True,
        offload="nvme",
        folders=tuple(args.path),
        bits=args.bits,
    )
    if args.share is not None:
        return replace(setting, host_share=args.share, kept_share=args.kept_share)
    cluster = machine(1)
    limits = largest.Limits(
        int(cluster.gpu.memory - args.keep_device * GIB),
        int((args.host_gib - args.keep_host) * GIB),
        int(args.disk_gib * GIB),
    )
    step = largest.Step(args.batch, args.length, args.bits)
    found = largest.fit(SIZES[args.size], "nvme", cluster, step, limits, {})
    if found is None:
        raise PlanError(
            f"{args.size}, {args.batch} x {args.length} tokens: not in {limits.device / GIB:.1f} GiB of the GPU, "
            f"{limits.host / GIB:.1f} GiB of host memory and {limits.disk / GIB:.1f} GiB of disk; take a smaller "
            "--size or more of them (--keep-device, --host-gib, --keep-host, --disk-gib)"
        )
    made = found.row
    clock.say(
        f"split: {found.share:.3f} of the state off the GPU, {found.on_host:.3f} in host memory; by the plan "
        f"{made.total / GIB:.1f} GiB of the GPU with reserves, {made.host / GIB:.1f} of the host, "
        f"{made.disk / GIB:.1f} of the disk"
    )
    return replace(setting, host_share=found.share, kept_share=found.on_host)


def disk_rate(paths: Sequence[str], gib: float, clock: Clock) -> float:
    """Bytes per second in both directions at once, after one pass that writes the files."""
    passes = DiskPasses(paths, int(gib * GIB))
    try:
        began = time.perf_counter()
        rate = passes.both() / (time.perf_counter() - began)
    finally:
        passes.close()
    clock.say(f"disk: {rate / 1e9:.2f} GB/s, reading and writing at once, {gib:g} GiB")
    return rate


def rate_of_state(trainer: Trainer, clock: Clock) -> float:
    """The same over the state's own files, which is lost then; 0 where it is less than one window.

    A disk may give less over 60 GiB than over 6: on the machines of the GPU rows in benchmarks/README.md by a quarter.
    """
    began = time.perf_counter()
    moved = trainer.pass_over_disk()
    seconds = time.perf_counter() - began
    if moved:
        clock.say(
            f"disk: {moved / seconds / 1e9:.2f} GB/s over the state, {moved / 2 / GIB:.1f} GiB, in {seconds:.1f} s"
        )
    return moved / seconds


def make_room(args: argparse.Namespace, clock: Clock) -> None:
    """Let the machine's memory grow where it says that it has less than may be taken."""
    wanted, there = int((args.host_gib - args.keep_host) * GIB) + SPARE_NBYTES, available_bytes()
    if args.share is None and there is not None and there < wanted:
        clock.say(f"memory: {there / GIB:.0f} GiB available, so {wanted / GIB:.0f} are filled once")
        whole = grow(wanted, max(1.0, clock.left))
        clock.say(f"memory: {'' if whole else 'not '}filled; {(available_bytes() or 0) / GIB:.0f} GiB available")


def compute_floor(setting: Setting, clock: Clock) -> float:
    """Seconds of forward and backward alone; of a few layers, and as many more as there are."""
    shape, (few, more) = setting.shape, FLOOR_LAYERS
    if shape.layers <= more:
        seconds = forward_backward(shape, setting)
    else:
        low, high = (forward_backward(replace(shape, layers=layers), setting) for layers in (few, more))
        seconds = high + (high - low) / (more - few) * (shape.layers - more)
    clock.say(f"compute: {seconds:.3f} s, forward and backward alone of {shape.layers} layers")
    return seconds


def forward_backward(shape: Shape, setting: Setting) -> float:
    """The median of a few passes of a model of its own, after one."""
    with setting.device:
        model = Llama(shape, checkpointing=True).to(torch.bfloat16)
    (ids, targets), *_ = batches(replace(setting, accumulation=1), setting.length)[0]
    found: list[float] = []
    for _ in range(1 + FLOOR_STEPS):
        synchronize(setting.device)
        began = time.perf_counter()
        model(ids, targets).backward()
        synchronize(setting.device)
        found.append(time.perf_counter() - began)
        model.zero_grad(set_to_none=True)
    del model
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    return statistics.median(found[1:])


def train(
    setting: Setting, args: argparse.Namespace, rates: list[float], compute: float, clock: Clock
) -> dict[str, Any]:
    """Build the model, take the steps, and put all figures beside those of the plan."""
    load(setting.engine)
    before, free = host_peak(), disk_free(args.path)
    began = time.perf_counter()
    trainer = build(setting)
    synchronize(setting.device)
    init = time.perf_counter() - began
    used = free - disk_free(args.path)
    clock.say(f"init: {init:.1f} s for {trainer.numel / 1e9:.2f}e9 parameters; the process has {host_peak()} GiB")
    steps = take_steps(trainer, setting, args, clock)
    plan = trainer.plan()
    assert plan is not None
    allocated, reserved = (memory(setting.device, read, trainer.outside) for read in _PEAKS)
    rates.append(rate := rate_of_state(trainer, clock) or rates[0])
    trainer.abandon()  # closing would copy the master weights on disk to host memory
    floor = max(compute, disk := disk_traffic(plan).total / rate)
    step = statistics.median(steps.timed)
    return {
        "setting": f"{args.size}, {args.batch} x {args.length} tokens, clipped, moments in {args.bits} bits, "
        f"{_card(setting.device)}",
        "parameters": trainer.numel,
        "shares": {"off_device": setting.host_share, "in_host_memory": setting.kept_share},
        "step_s": step,
        "timed_s": steps.timed,
        "warm_up_s": steps.before,
        "update_alone_s": steps.update,
        "loss": steps.loss,
        "compute_floor_s": compute,
        "disk_floor_s": disk,
        "disk_rates": rates,
        "ratio": step / floor,
        "goal": GOAL,
        "init_s": init,
        "allocated_gib": allocated,
        "reserved_gib": reserved,
        "host_gib": host_peak(),
        "host_before_gib": before,
        "disk_gib": used / GIB,
        "state_disk_gib": state_bytes(plan).disk / GIB,
        "planned": planned(setting, plan, 1, disk_rate=rate),
    }


_PEAKS = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def disk_free(paths: Sequence[str]) -> int:
    """Bytes that are free where the folders are, each disk counted once."""
    disks = {os.stat(path).st_dev: os.statvfs(path) for path in paths}
    return sum(one.f_bavail * one.f_frsize for one in disks.values())


def take_steps(trainer: Trainer, setting: Setting, args: argparse.Namespace, clock: Clock) -> Steps:
    """The steps, as many as the budget has room for; and the last update, which no forward waits for."""
    feed, found, loss = batches(setting, setting.length), list[float](), 0.0
    for number in range(args.warmup + args.steps):
        # What is still to come: this step, the last update, the pass over the disk, and what follows.
        if number > 1 and clock.left < 3 * max(found) + CLOSING_SECONDS:
            clock.say(f"steps: {clock.left:.0f} s of the budget are left, so there are no more")
            break
        if number == args.warmup and setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = float(trainer.step(feed[number % len(feed)]))
        synchronize(setting.device)
        found.append(time.perf_counter() - began)
        clock.say(f"step {number + 1}: {found[-1]:.2f} s, loss {loss:.3f}")
    began = time.perf_counter()
    trainer.drain()
    synchronize(setting.device)
    update = time.perf_counter() - began
    clock.say(f"steps: the last update alone {update:.2f} s")
    first = min(args.warmup, len(found) - 1)
    return Steps(found[first:], found[:first], update, loss)


def table(row: dict[str, Any]) -> str:
    """The figures beside those of the plan, in Markdown."""
    plan = row["planned"]

    def gib(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    lines = [
        f"{row['setting']}: {row['parameters'] / 1e9:.2f}e9 parameters, {len(row['timed_s'])} timed steps, "
        f"{len(row['warm_up_s'])} before them, disk {row['disk_rates'][0] / 1e9:.2f} GB/s, "
        f"over the whole state {row['disk_rates'][-1] / 1e9:.2f}",
        "| | predicted | measured |",
        "| --- | ---: | ---: |",
        f"| s/step | {plan['step_s']:.2f} | {row['step_s']:.2f} |",
        f"| compute floor, s | {plan['bounds']['compute']:.2f} | {row['compute_floor_s']:.2f} |",
        f"| disk floor, s, at the measured rate | {plan['bounds']['disk']:.2f} | {row['disk_floor_s']:.2f} |",
        f"| step, of the larger floor (goal {row['goal']:.2f}) | | {row['ratio']:.3f} |",
        f"| last update alone, s | | {row['update_alone_s']:.2f} |",
        f"| GPU, GiB allocated | {gib(plan['allocated_gib'])} | {gib(row['allocated_gib'])} |",
        f"| GPU, GiB reserved | | {gib(row['reserved_gib'])} |",
        f"| host, GiB; {row['host_before_gib']:.2f} of the measured before it | {gib(plan['host_gib'])} "
        f"| {gib(row['host_gib'])} |",
        f"| disk, GiB | {gib(plan['disk_gib'])} | {gib(row['disk_gib'])} |",
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="append", help="a folder on a disk; several are striped over")
    parser.add_argument("--size", choices=SIZES, default="20b")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--bits", type=int, choices=(32, 8), default=32, help="of Adam's moments; 8 needs torchao")
    parser.add_argument("--host-gib", type=float, default=128.0, help="host memory that may be used in all")
    parser.add_argument("--disk-gib", type=float, default=60.0, help="disk that may be used for state")
    parser.add_argument("--keep-host", type=float, default=6.0, help="GiB of host memory for the process itself")
    parser.add_argument("--keep-device", type=float, help="GiB of the GPU that are left alone: 2, with --bits 8 4")
    parser.add_argument("--share", type=float, help="of the state, off the GPU; chosen by the plan if not given")
    parser.add_argument("--kept-share", type=float, default=0.0, help="of the state, in host memory, beside --share")
    parser.add_argument("--probe-gib", type=float, default=6.0, help="size of the files by which the disk is measured")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", type=float, default=360.0, help="seconds in all, about")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.path = args.path or ["."]
    if args.keep_device is None:
        args.keep_device = 2.0 if args.bits == 32 else 4.0  # codes are made in temporaries that the plan does not count
    return args


if __name__ == "__main__":
    raise SystemExit(main())

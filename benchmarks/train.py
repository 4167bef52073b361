"""One measurement: one engine in one setting, one JSON line from rank 0.

    torchrun --nproc-per-node 2 -m benchmarks.train --engine zeroshard3 [--size 1b] [--batch 4] [--compile] ...
    python -m benchmarks.train --engine floor --size tiny            one process

After the warm-up, `--repetitions` times `--steps` steps are timed between two syncs, since a sync in every step would
hide whether the host keeps ahead of the GPU. The figure is the median of the repetitions on the slowest rank. Memory is
the peak of the timed steps, also on the worst rank. Tokens are random, or of a text, and the same for every engine.

    step_s        seconds per step                       tokens_s    tokens per second and GPU
    host_s        seconds in which the host issues a step that starts on an empty queue, the smallest of the repetitions
    mfu           model flops per second over the card's dense bf16 peak; null for a card that is not in PEAKS
    allocated_gib, reserved_gib     peaks of torch's allocator; null without a GPU
    host_gib, host_before_gib       peak of a process's host memory, locked pages included, and before it built anything
    planned                         with --plan: what zeroshard's planner says of the plan that ran (benchmarks.planned)
    init_s, init_gib                to build model and engine until it could take a step, and what it then holds
    first_loss, loss                of the first and the last step; with --text all engines start from the same values
    gathered_mib, reduced_mib       with --wire: bytes of a step's collectives on a rank (benchmarks.wire)

`--profile FILE` also writes a chrome trace of a few steady steps of rank 0 and prints its account (benchmarks.account).
`--sync-error` takes steps during which any synchronizing torch call is an error, and reports the first one. Without a
GPU everything runs on gloo and the CPU; such times say nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.account import STEP, account, read_trace
from benchmarks.engines import ENGINES, build, load
from benchmarks.llama import SIZES, Shape
from benchmarks.setting import CLIP, MicroBatch, NotInstalled, Setting, Trainer
from benchmarks.text import Text

GIB = 2**30
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 peaks by a part of the card's name, in flop/s; the first that fits."""
PROFILED_STEPS = 4
CHECKED_STEPS = 2
OFFLOADS = ("none", "streamed", "processor", "param", "param-processor", "nvme", "auto")
FP8 = ("none", "tensorwise", "tensorwise-cast", "rowwise", "blockwise", "blockwise-cast")
BATCHES = 4
TEXT_STEPS, TEXT_RATE = 32, 3e-4


@dataclass(frozen=True)
class Timing:
    """Seconds per step, one for each repetition, and the least in which the host issued one; on the slowest rank."""

    steps: list[float]
    host: float
    loss: float


def main() -> int:
    args = parse()
    device = start()
    setting = Setting(
        engine=args.engine,
        device=device,
        size=args.size,
        batch=args.batch,
        accumulation=args.accumulation,
        checkpointing=args.checkpointing,
        compiled=args.compile,
        tuned=args.tuned,
        offload=args.offload,
        host_share=args.host_share,
        folders=tuple(args.folder or (".",)),
        kept_share=args.kept_share,
        bits=args.bits,
        clip=args.clip,
        graph=args.graph,
        spare=args.spare,
        cap_gib=args.cap_gib,
        length=args.length,
        fp8=args.fp8,
        fp8_layers=args.fp8_layers,
        exact=args.text,
        rate=TEXT_RATE if args.text else Setting.rate,
    )
    limit_memory(setting.cap_gib, device)
    try:
        result, failed = measure(setting, args)
    except NotInstalled as error:
        result, failed = {**identity(setting, args), "error": str(error)}, False
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    if failed:
        # A step was broken off: peers may be inside a collective, and tearing groups down would wait for them.
        sys.stdout.flush()
        os._exit(1)
    dist.destroy_process_group()
    return 0


def start() -> torch.device:
    """Join the other ranks, or be a world of one where nobody launched us; gives this rank's device."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def limit_memory(cap_gib: float | None, device: torch.device) -> None:
    """Let torch's allocator take no more of the card than `cap_gib`."""
    if cap_gib is not None and device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * GIB / total), device)


def measure(setting: Setting, args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Build, warm up, time, and what else was asked for; the JSON row and whether a step was broken off."""
    load(setting.engine)
    before = host_peak()
    began = time.perf_counter()
    trainer = build(setting)
    synchronize(setting.device)
    init_s, init_gib = time.perf_counter() - began, memory(setting.device, torch.cuda.memory_allocated, trainer.outside)
    # A graph takes its memory when it is captured, in the warm-up, so there peaks count from the start.
    feed = texts(setting, args.length) if args.text else batches(setting, args.length)
    first = trainer.step(feed[-1]).clone()
    step = warmed_up(trainer, feed, setting.device, args.warmup, forget=not setting.graph)
    timing = timed(step, setting.device, args.steps, args.repetitions)
    row = {
        **identity(setting, args),
        "params": trainer.numel,
        **speed(timing, setting, args.length),
        "allocated_gib": slowest(memory(setting.device, torch.cuda.max_memory_allocated, trainer.outside)),
        "reserved_gib": slowest(memory(setting.device, torch.cuda.max_memory_reserved, trainer.outside)),
        "host_gib": slowest(host_peak()),
        "host_before_gib": slowest(before),
        "init_s": round(slowest(init_s) or 0.0, 2),
        "init_gib": init_gib,
        "first_loss": round(mean(float(first)), 4),
        "loss": round(mean(timing.loss) if args.text else timing.loss, 4),
    }
    if args.profile is not None:
        row["account"] = profiled(step, setting.device, args.profile, statistics.median(timing.steps))
    plan = trainer.plan() if args.plan else None
    if plan is not None and dist.get_rank() == 0:
        planned = importlib.import_module("benchmarks.planned").planned  # the planner is nothing to the other rows
        row["planned"] = planned(setting, plan, dist.get_world_size(), args.calibration)
    if args.wire:
        row |= wire(trainer, lambda: step(0))
    failed = False
    if args.sync_error:
        row["sync_error"] = synchronizes(step, setting.device)
        failed = row["sync_error"] is not None
    if not failed:
        finish(trainer, setting.device)
    return row, failed


def identity(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """What was measured, and on what."""
    apart = ("device", "exact", "rate", "length")
    fields = {name: value for name, value in asdict(setting).items() if name not in apart}
    card = torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else "cpu"
    return {
        **fields,
        "length": args.length,
        "world": dist.get_world_size(),
        "card": card,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def batches(setting: Setting, length: int) -> list[list[MicroBatch]]:
    """Random tokens of this rank, on the device: a few steps' worth of micro-batches."""
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    size = (setting.batch, length + 1)
    feed: list[list[MicroBatch]] = []
    for _ in range(BATCHES):
        rows = [torch.randint(setting.shape.vocabulary, size, generator=generator) for _ in range(setting.accumulation)]
        on_device = [row.to(setting.device) for row in rows]
        feed.append([(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in on_device])
    return feed


def texts(setting: Setting, length: int) -> list[list[MicroBatch]]:
    """Micro-batches of real text of this rank, on the device, for so many steps that few are seen twice."""
    text = Text(setting.batch, length, setting.device)
    return [[text.take() for _ in range(setting.accumulation)] for _ in range(TEXT_STEPS)]


def wire(trainer: Trainer, step: Callable[[], object]) -> dict[str, Any]:
    """What a step sends; nothing for an engine that does not tell, or alone."""
    found = trainer.wire(step) if dist.get_world_size() > 1 else None
    if found is None:
        return {"gathered_mib": None, "reduced_mib": None}
    return {"gathered_mib": round(found.gathered / 2**20, 2), "reduced_mib": round(found.reduced / 2**20, 2)}


def mean(value: float) -> float:
    """The mean over ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def warmed_up(
    trainer: Trainer, feed: Sequence[list[MicroBatch]], device: torch.device, steps: int, *, forget: bool = True
) -> Callable[[int], torch.Tensor]:
    """What takes the step of a number, after `steps` of them; `forget`: peaks of memory count from here on."""

    def step(index: int) -> torch.Tensor:
        return trainer.step(feed[index % len(feed)])

    for index in range(steps):
        step(index)
    if forget and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return step


def timed(step: Callable[[int], torch.Tensor], device: torch.device, steps: int, repetitions: int) -> Timing:
    """Time `repetitions` times `steps` steps, each run of steps between two syncs."""
    seconds: list[float] = []
    issuing: list[float] = []
    loss = torch.zeros(())
    for _ in range(repetitions):
        synchronize(device)
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        loss = step(0)
        issuing.append(time.perf_counter() - began)
        for index in range(1, steps):
            loss = step(index)
        synchronize(device)
        seconds.append((time.perf_counter() - began) / steps)
    worst = torch.tensor([*seconds, min(issuing)], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    *seconds, host = worst.tolist()
    return Timing(seconds, host, float(loss))


def speed(timing: Timing, setting: Setting, length: int) -> dict[str, Any]:
    """The figures that follow from the times."""
    median = statistics.median(timing.steps)
    tokens = setting.batch * setting.accumulation * length / median
    return {
        "step_s": round(median, 5),
        "step_s_all": [round(seconds, 5) for seconds in timing.steps],
        "host_s": round(timing.host, 5),
        "tokens_s": round(tokens),
        "mfu": utilization(setting.shape, tokens, length, setting.device),
    }


def utilization(shape: Shape, tokens: float, length: int, device: torch.device) -> float | None:
    """Model flops per second over the card's peak; None for an unknown card."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((flops for part, flops in PEAKS.items() if part in name), None)
    return None if peak is None else round(tokens * shape.flops_per_token(length) / peak, 4)


def profiled(
    step: Callable[[int], torch.Tensor], device: torch.device, path: Path, step_s: float
) -> dict[str, Any] | None:
    """Trace a few steps; rank 0 writes the trace and prints its account. The account, or None without a GPU.

    The profiler slows the host, so what it shows as idle may be its own doing: the time of an unobserved step,
    `step_s`, less the busy time is what is really idle.
    """
    synchronize(device)
    dist.barrier()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as recorded:
        for index in range(PROFILED_STEPS):
            with record_function(STEP):
                step(index)
        synchronize(device)
    if dist.get_rank() != 0:
        return None
    recorded.export_chrome_trace(str(path))
    found = account(read_trace(path))
    if found is None:
        print("no account: nothing ran on a GPU", file=sys.stderr, flush=True)
        return None
    unobserved = max(0.0, 1000 * step_s - found.busy)
    text = [*found.lines(), f"idle without the profiler: {unobserved:.3f} ms of {1000 * step_s:.3f}"]
    print("\n".join(text), file=sys.stderr, flush=True)
    return {**found.as_dict(), "idle_unobserved": unobserved}


def synchronizes(step: Callable[[int], torch.Tensor], device: torch.device) -> str | None:
    """The first synchronizing torch call of a step, as an error message; None if there is none."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(CHECKED_STEPS):
            step(index)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def finish(trainer: Trainer, device: torch.device) -> None:
    """Take the engine down once all ranks are through."""
    synchronize(device)
    dist.barrier()
    trainer.close()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device, read: Callable[[], int], outside: int) -> float | None:
    """What an allocator statistic says and what lies outside of the allocator, in GiB; None without a GPU."""
    return round((read() + outside) / GIB, 3) if device.type == "cuda" else None


def used(device: torch.device) -> int:
    """Bytes of the card that anybody uses: the allocator's, peers', the context and communicators."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def host_peak() -> float:
    """The most memory that this process has had so far, in GiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2)


def slowest(value: float | None) -> float | None:
    """The largest value of any rank. All ranks have one, or none has."""
    if value is None:
        return None
    worst = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def add_setting(parser: argparse.ArgumentParser) -> None:
    """The options that say what is measured; the same for one measurement and for a list of them."""
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--batch", type=int, default=4, help="sequences per micro-batch and GPU")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations, block by block")
    parser.add_argument("--compile", action="store_true", help="compile every block")
    parser.add_argument("--offload", choices=OFFLOADS, default="none", help="optimizer's state off the device")
    parser.add_argument("--host-share", type=float, default=1.0, help="the share of it, for zeroshard")
    parser.add_argument("--folder", action="append", help="of --offload nvme, on a disk; several are striped over")
    parser.add_argument("--kept-share", type=float, default=0.0, help="of it, in host memory beside the disk")
    parser.add_argument("--bits", type=int, choices=(32, 8), default=32, help="of Adam's moments, for zeroshard")
    parser.add_argument("--clip", type=float, default=CLIP, help="largest global norm; 0 is no clipping")
    parser.add_argument("--graph", action="store_true", help="replay steps as a CUDA graph: zeroshard and the floor")
    parser.add_argument("--spare", type=float, default=0.0, help="GiB for units that stay gathered, for zeroshard")
    parser.add_argument("--cap-gib", type=float, help="GiB of the card that may be used, as if it had no more")
    parser.add_argument("--plan", action="store_true", help="what zeroshard's planner says of the plan that ran")
    parser.add_argument("--calibration", type=Path, help="with rates that zeroshard doctor measured on this machine")
    parser.add_argument(
        "--fp8", choices=FP8, default="none", help="recipe of products; -cast: weights cast in forwards"
    )
    parser.add_argument("--fp8-layers", default="auto", help='of zeroshard, as "blocks" or "auto,head"')
    parser.add_argument("--text", action="store_true", help="train on real text, all from the same values")
    parser.add_argument("--wire", action="store_true", help="bytes on the wire, which may change the engine at the end")
    parser.add_argument("--tuned", action="store_true", help="what a user who reads the engine's manual adds")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    add_setting(parser)
    parser.add_argument("--steps", type=int, default=10, help="steps between two syncs")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a trace there (.json or .json.gz)")
    parser.add_argument("--sync-error", action="store_true", help="report the first synchronizing call of a step")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""The optimizer's step on the host: zeroshard's kernel, torch's fused AdamW and what memory gives, in one run.

    python -m benchmarks host-adam [--numel 33554432] [--rounds 15] [--threads N ...] [--json FILE]

Three jobs, each with the bytes per parameter that one pass must move (read and written once):

    fp32 gradient                        read 4 + 12, write 12       28
    fp32 gradient, bf16 parameter        read 4 + 12, write 12 + 2   30
    bf16 gradient, bf16 parameter        read 2 + 12, write 12 + 2   28

torch has no pass that does the second and third: it copies the gradient to float32 before and the parameter to bf16
after. Memory's rate is that of a triad with stores past the caches (12 bytes) or of a scaling in place (16 bytes),
whichever is faster. All contenders take a turn in each round, in an order that rotates: two runs, of which the second
is timed. A ratio is the median of the rounds' ratios, so that what disturbs the machine disturbs both. DeepSpeedCPUAdam
takes part where it can be imported, and compiled: it builds its kernel at first use.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from zeroshard.optim.host.choose import host_kernel
from zeroshard.optim.host.kernel import HostKernel
from zeroshard.optim.host.native import NativeBackend
from zeroshard.optim.host.scalars import adam_scalars
from zeroshard.optim.host.torch_twin import TorchTwin
from zeroshard.optim.rules import ADAMW

RATE = 1e-4
JOBS = {"fp32": 28, "fp32, bf16 out": 30, "bf16, bf16 out": 28}
GOALS = {"fp32": 1.0, "fp32, bf16 out": 1.25, "bf16, bf16 out": 1.65}


@dataclass(frozen=True)
class Contender:
    """Something that is timed: `nbytes` are what one pass must move per element."""

    name: str
    job: str
    nbytes: int
    run: Callable[[], object]


class Memory:
    """The tensors of one contender."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        self.master = torch.randn(numel)
        self.grad = torch.randn(numel) * 1e-2
        self.half_grad = self.grad.bfloat16()
        self.moments = [torch.zeros(numel), torch.zeros(numel)]
        self.out = torch.zeros(numel, dtype=torch.bfloat16)


def kernel_rows(name: str, kernel: HostKernel, memory: Memory) -> list[Contender]:
    scalars = adam_scalars({**ADAMW.defaults, "lr": RATE}, 10)
    master, moments, out = memory.master, memory.moments, memory.out

    def step(grad: torch.Tensor, written: torch.Tensor | None) -> Callable[[], object]:
        return lambda: kernel.step(scalars, master, grad, moments, written)

    works = step(memory.grad, None), step(memory.grad, out), step(memory.half_grad, out)
    return [Contender(name, job, nbytes, work) for (job, nbytes), work in zip(JOBS.items(), works, strict=True)]


def optimizer_rows(name: str, optimizer: torch.optim.Optimizer, memory: Memory, param: torch.Tensor) -> list[Contender]:
    def with_out() -> None:
        optimizer.step()
        memory.out.copy_(param.detach())

    def from_half() -> None:
        memory.grad.copy_(memory.half_grad)
        with_out()

    works: tuple[Callable[[], object], ...] = optimizer.step, with_out, from_half
    return [Contender(name, job, nbytes, work) for (job, nbytes), work in zip(JOBS.items(), works, strict=True)]


def torch_rows(memory: Memory) -> list[Contender]:
    param = torch.nn.Parameter(memory.master)
    param.grad = memory.grad
    return optimizer_rows("torch fused", torch.optim.AdamW([param], lr=RATE, fused=True), memory, param)


def deepspeed_rows(memory: Memory) -> list[Contender]:
    # It compiles its kernel at first use, with ninja and a compiler, in minutes: in a folder of its own, since another
    # process that was killed meanwhile leaves a lock in the usual one, for which everybody after it waits.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", tempfile.mkdtemp(prefix="host-adam-"))
    try:
        if "zeroshard" in importlib.import_module("deepspeed").__version__:
            raise ImportError("the deepspeed that is installed is zeroshard's")
        found = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        param = torch.nn.Parameter(memory.master)
        param.grad = memory.grad
        optimizer = found([param], lr=RATE)
        optimizer.step()
    except (ImportError, RuntimeError, OSError) as error:
        print(f"DeepSpeedCPUAdam takes no part: {type(error).__name__}: {str(error).splitlines()[0]}")
        return []
    return optimizer_rows("DeepSpeedCPUAdam", optimizer, memory, param)


def stream_rows(backend: NativeBackend, memory: Memory, threads: int) -> list[Contender]:
    a, (b, c) = memory.master, memory.moments
    return [
        Contender("stream", "triad", 12, lambda: backend.stream(a, b, c, 1.0, threads)),
        Contender("stream", "in place", 16, lambda: backend.stream(None, b, c, 1.0, threads)),
    ]


def measure(contenders: list[Contender], rounds: int) -> list[list[float]]:
    """Seconds of each contender in each round: of the second of two runs in a row.

    The first wakes its threads, while those of the contender before it may still spin: an optimizer updates many units
    in a row, and is asleep before the first of them only.
    """
    times: list[list[float]] = [[] for _ in contenders]
    for turn in range(rounds):
        for place in range(len(contenders)):
            number = (place + turn) % len(contenders)
            contenders[number].run()
            started = time.perf_counter()
            contenders[number].run()
            times[number].append(time.perf_counter() - started)
    return times


def ratio(ours: list[float], theirs: list[float]) -> float:
    """How many times faster ours is: the median over the rounds."""
    return statistics.median(other / one for one, other in zip(ours, theirs, strict=True))


def summary(contenders: list[Contender], times: list[list[float]], numel: int) -> list[dict[str, object]]:
    """A row for each contender: rate, share of the stream bound, times torch."""
    streams = [(numel * c.nbytes / statistics.median(t), c, t) for c, t in zip(contenders, times, strict=True)]
    bound = max((entry for entry in streams if entry[1].name == "stream"), key=lambda entry: entry[0], default=None)
    torch_of = {c.job: t for c, t in zip(contenders, times, strict=True) if c.name == "torch fused"}
    rows: list[dict[str, object]] = []
    for contender, spent in zip(contenders, times, strict=True):
        share = None if bound is None else ratio(spent, bound[2]) * contender.nbytes / bound[1].nbytes
        rows.append(
            {
                "contender": contender.name,
                "job": contender.job,
                "bytes": contender.nbytes,
                "ms": statistics.median(spent) * 1e3,
                "gparam_s": numel / statistics.median(spent) / 1e9,
                "gb_s": numel * contender.nbytes / statistics.median(spent) / 1e9,
                "of_stream": share,
                "times_torch": ratio(spent, torch_of[contender.job]) if contender.job in torch_of else None,
            }
        )
    return rows


def report(rows: list[dict[str, object]], args: argparse.Namespace, threads: int, kernel: HostKernel) -> None:
    table = Table(title=f"{args.numel} parameters, {threads} threads, {args.rounds} rounds; kernel: {kernel}")
    for column in ("contender", "gradient", "bytes", "ms", "Gparam/s", "GB/s", "of stream", "x torch", "goal"):
        table.add_column(column, justify="left" if column in ("contender", "gradient") else "right")
    for row in rows:
        share, times = row["of_stream"], row["times_torch"]
        goal = GOALS.get(str(row["job"])) if row["contender"] == "zeroshard" else None
        table.add_row(
            str(row["contender"]),
            str(row["job"]),
            str(row["bytes"]),
            f"{row['ms']:.1f}",
            f"{row['gparam_s']:.3f}",
            f"{row['gb_s']:.1f}",
            "-" if share is None else f"{share:.2f}",
            "-" if times is None else f"{times:.2f}",
            "" if goal is None else f">= {goal}, 0.95 of stream",
        )
    Console(width=130).print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 25, help="parameters; a multiple of 32, far more than caches")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[torch.get_num_threads()], help="one or several numbers"
    )
    parser.add_argument("--twin", action="store_true", help="time the PyTorch twin too, which is slow")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args()


def run(args: argparse.Namespace, threads: int) -> dict[str, object]:
    """Measure with a number of threads and print the table; the figures for JSON."""
    torch.set_num_threads(threads)
    kernel = host_kernel(threads)
    memory = Memory(args.numel)
    contenders: list[Contender] = []
    if isinstance(kernel.backend, NativeBackend):
        contenders += stream_rows(kernel.backend, memory, threads)
    contenders += kernel_rows("zeroshard", kernel, memory)
    contenders += torch_rows(Memory(args.numel)) + deepspeed_rows(Memory(args.numel))
    if args.twin:
        contenders += kernel_rows("zeroshard twin", HostKernel(TorchTwin(), threads, "asked for"), memory)
    rows = summary(contenders, measure(contenders, args.rounds), args.numel)
    report(rows, args, threads, kernel)
    return {"numel": args.numel, "threads": threads, "rounds": args.rounds, "kernel": str(kernel), "rows": rows}


def main() -> int:
    args = parse()
    found = [run(args, threads) for threads in args.threads]
    if args.json is not None:
        machine = {"torch": torch.__version__, "machine": platform.processor() or platform.machine()}
        args.json.write_text(json.dumps({**machine, "runs": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The loss curves of zeroshard, FSDP2 and DDP on the same tokens from the same initial weights.

    python -m benchmarks.losses [--size tiny] [--steps 200] [--nproc 2] [--json FILE]

Tokens are the bytes of Python's own help topics, so that there is something to learn; a step's loss is the mean over
ranks and micro-batches, kept on the device until the end. The engines differ in rounding alone: DDP keeps fp32
parameters under autocast, FSDP2 and zeroshard compute with bf16 copies of fp32 parameters and reduce in bf16. Printed
is the largest and the mean distance of each pair of curves. Every engine runs in processes of its own; one that fails
leaves the others alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.compare import device_count
from benchmarks.engines import ENGINES, build
from benchmarks.llama import SIZES
from benchmarks.ranks import run_ranks
from benchmarks.setting import Setting
from benchmarks.text import Text
from benchmarks.train import start

DEFAULT = ("zeroshard3", "fsdp2", "ddp")
RATE = 3e-4
SHOWN = 8
"""Points of each curve in the table."""


def work(args: argparse.Namespace) -> None:
    """One rank of one engine; rank 0 prints the curve as a JSON list."""
    device = start()
    setting = Setting(args.worker, device, size=args.size, batch=args.batch, exact=True, rate=RATE)
    trainer = build(setting)
    text = Text(args.batch, args.length, device)
    # Cloned: an engine may reuse the memory of the loss in its next step.
    losses = torch.stack([trainer.step([text.take()]).float().clone() for _ in range(args.steps)]).double().cpu()
    dist.all_reduce(losses)
    if dist.get_rank() == 0:
        print(json.dumps((losses / dist.get_world_size()).tolist()), flush=True)
    trainer.close()
    dist.destroy_process_group()


def curve_of(engine: str, args: argparse.Namespace, say: Console) -> list[float] | None:
    """The curve of one engine; None, with a line that says why, where it fails."""
    options = ["--worker", engine, "--size", args.size, "--steps", str(args.steps)]
    options += ["--batch", str(args.batch), "--length", str(args.length)]
    done = run_ranks("benchmarks.losses", options, nproc=args.nproc, timeout=args.timeout)
    lines = [line for line in done.output.splitlines() if line.startswith("[")]
    if done.error is not None or not lines:
        say.print(f"{engine}: {done.error or 'no curve'}\n{done.log}", markup=False, highlight=False)
        return None
    return json.loads(lines[-1])


def distances(curves: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """For each pair of curves the largest and the mean distance, in nats."""
    found: dict[str, dict[str, float]] = {}
    for (one, a), (other, b) in combinations(curves.items(), 2):
        apart = [abs(x - y) for x, y in zip(a, b, strict=True)]
        found[f"{one} - {other}"] = {"max": max(apart), "mean": statistics.fmean(apart)}
    return found


def report(curves: Mapping[str, Sequence[float]], args: argparse.Namespace, say: Console) -> dict[str, Any]:
    steps = sorted({round(index * (args.steps - 1) / (SHOWN - 1)) for index in range(SHOWN)})
    table = Table(title=f"loss in nats, {args.size}, {args.nproc} ranks, {args.batch} x {args.length} tokens a rank")
    table.add_column("step")
    for name in curves:
        table.add_column(name, justify="right")
    for step in steps:
        table.add_row(str(step + 1), *(f"{curve[step]:.4f}" for curve in curves.values()))
    say.print(table)
    apart = distances(curves)
    for pair, values in apart.items():
        say.print(f"{pair}: max {values['max']:.2e}, mean {values['mean']:.2e}", highlight=False)
    return {"torch": torch.__version__, "size": args.size, "nproc": args.nproc, "distances": apart, "curves": curves}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, action="append", help=f"may be repeated; default {DEFAULT}")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--nproc", type=int, help="ranks; by default one for each GPU")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one engine")
    parser.add_argument("--json", type=Path, help="write the curves there")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.worker is not None:
        work(args)
        return 0
    args.nproc = device_count() if args.nproc is None else args.nproc
    say = Console(width=110)
    found = {engine: curve_of(engine, args, say) for engine in args.engine or DEFAULT}
    curves = {engine: curve for engine, curve in found.items() if curve is not None}
    if not curves:
        return 1
    result = report(curves, args, say)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if len(curves) == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What it costs to see everything of a run: the same training with and without, in turn, in one process.

    python -m benchmarks observed [--size 1b] [--length 2048] [--batch 1 4] [--pairs 16] [--steps 6]

Two engines of `initialize` with the same model, bf16 at stage 3, one with nothing on and one with all that the config
can ask for: `wall_clock_breakdown`, `comms_logger`, `csv_monitor`, `run_log`, `metrics`, `steps_per_print` and the
counted step of `flops_profiler`, which comes before the timed ones. They are timed in turn, `--steps` steps each, the
order swapped from pair to pair. The figure is the median of the pairs' ratios, its range the quartiles; a second pair
of two engines with nothing on shows what the method itself can tell apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import zeroshard
from benchmarks.llama import SIZES, Llama
from zeroshard.engine.engine import Engine

WARMUP = 4
Step = Callable[[], None]


def config(batch: int, folder: str | None) -> dict[str, Any]:
    """What `initialize` gets; with a folder everything is on, and leaves its files there."""
    plain: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
        "steps_per_print": 1_000_000,
    }
    if folder is None:
        return plain
    return {
        **plain,
        "steps_per_print": 10,
        "wall_clock_breakdown": True,
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True, "output_file": f"{folder}/flops"},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        "run_log": {"path": f"{folder}/run.jsonl"},
        "metrics": {"enabled": True, "directory": f"{folder}/metrics"},
    }


def trainer(args: argparse.Namespace, batch: int, folder: str | None) -> tuple[Engine, Step]:
    shape = SIZES[args.size]
    torch.manual_seed(0)
    with zeroshard.Init():
        model = Llama(shape)
    engine, *_ = zeroshard.initialize(model=model, config=config(batch, folder))
    tokens = torch.randint(shape.vocabulary, (batch, args.length), device=engine.device)

    def step() -> None:
        engine.backward(engine(tokens, tokens))
        engine.step()

    return engine, step


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(step: Step, steps: int) -> float:
    synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - started) / steps


def pairs(one: Step, other: Step, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Seconds of a step of both, pair after pair."""
    for step in (one, other):
        seconds(step, WARMUP)
    found: list[tuple[float, float]] = []
    for pair in range(args.pairs):
        if pair % 2 == 0:
            found.append((seconds(one, args.steps), seconds(other, args.steps)))
        else:
            second = seconds(other, args.steps)
            found.append((seconds(one, args.steps), second))
    return found


def measured(args: argparse.Namespace, batch: int) -> dict[str, dict[str, float]]:
    """By what is compared with nothing on: milliseconds of both, and the ratio with its quartiles."""
    rows: dict[str, dict[str, float]] = {}
    for name in ("nothing", "everything"):
        with tempfile.TemporaryDirectory() as folder:
            plain, plain_step = trainer(args, batch, None)
            seen, seen_step = trainer(args, batch, folder if name == "everything" else None)
            times = pairs(plain_step, seen_step, args)
            plain.destroy()
            seen.destroy()
            ratios = statistics.quantiles([theirs / ours for ours, theirs in times], n=4)
            rows[name] = {
                "off_ms": 1000 * statistics.median(ours for ours, _ in times),
                "on_ms": 1000 * statistics.median(theirs for _, theirs in times),
                "low": ratios[0],
                "ratio": ratios[1],
                "high": ratios[2],
            }
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6, help="steps in each timing")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse()
    found = {batch: measured(args, batch) for batch in args.batch}
    if args.json:
        print(json.dumps(found, indent=2))
        return
    table = Table(title=f"{args.size}, {args.length} tokens a row, {args.pairs} pairs of {args.steps} steps")
    for column in ("batch", "switched on", "off ms", "on ms", "ratio", "quartiles"):
        table.add_column(column, justify="left" if column == "switched on" else "right")
    for batch, rows in found.items():
        for name, row in rows.items():
            times = [f"{row['off_ms']:.2f}", f"{row['on_ms']:.2f}", f"{row['ratio']:.4f}"]
            table.add_row(str(batch), name, *times, f"{row['low']:.4f} to {row['high']:.4f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()

"""Weak scaling: the same micro-batch for each GPU on one GPU, two, four and so on, beside the floor of one GPU.

    python -m benchmarks.scaling [--sizes 1b 7b 13b] [--gpus 1 2 4 8] [--engines zeroshard3 fsdp2 ...] [--output FOLDER]
    python -m benchmarks.scaling --predict H200-141GB --gpus 1 2 4 8    what the planner says of such cards; needs none

Every row is a measurement of benchmarks.train in processes of its own. What an engine keeps is its tokens per second
and GPU over those of forward and backward alone on one GPU, which has no optimizer and no communication. Rows of
zeroshard get what the planner predicts of the plan that ran. Of an engine the row with the most GPUs comes first, for
`--budget` may end. Rejected: presets of `compare`, which would not know how many GPUs there are.

Without `--gpus` it takes one GPU and every power of two that this machine has. Options that it does not know go to
every row: `--sizes tiny --length 64` tries it on a CPU. The output folder gets scaling.json and scaling.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.compare import SETTING, device_count, run
from benchmarks.llama import SIZES
from benchmarks.report import (
    Outcome,
    add_limits,
    add_ratios,
    console_table,
    markdown_table,
    number,
    percent,
    provenance,
    save,
    unmeasured,
)
from benchmarks.scaling_predicted import COLUMNS as PREDICTED
from benchmarks.scaling_predicted import predicted
from zeroshard.errors import PlanError

ENGINES = ("zeroshard3", "fsdp2", "deepspeed3", "zeroshard2", "zeroshard1")
COMPILED = ("zeroshard3", "fsdp2")
CHECKPOINTED = 6e9
"""Models of so many parameters recompute their activations."""
LARGE = 1e10
"""Models of so many parameters are measured on several GPUs at stage 3 alone, eager."""
COLUMNS = (
    "engine",
    "setting",
    "GPUs",
    "s/step",
    "predicted",
    "tokens/s/GPU",
    "of one GPU's floor",
    "MFU",
    "GiB",
    "predicted",
    "reserved",
)


def rows_of(size: str, gpus: Sequence[int], engines: Sequence[str]) -> list[str]:
    """The rows of a size: eager and compiled, each behind the floor of one GPU."""
    numel, setting = SIZES[size].numel, f" --size {size}"
    if numel > CHECKPOINTED:
        setting += " --checkpointing --steps 4 --warmup 3"
    if numel > LARGE:
        engines = [engine for engine in engines if engine not in ("zeroshard1", "zeroshard2")]
    found: list[str] = []
    for compiled in ("",) if numel > LARGE else ("", " --compile"):
        found.append(f"floor{setting}{compiled} --nproc 1")
        for engine in engines:
            if compiled and engine not in COMPILED:
                continue
            alone = engine not in ("zeroshard1", "zeroshard2") and numel <= LARGE  # one GPU has but one stage
            plan = " --plan" if engine.startswith("zeroshard") else ""
            counts = [count for count in sorted(set(gpus), reverse=True) if count > 1 or alone]
            found += [f"{engine}{setting}{compiled}{plan} --nproc {count}" for count in counts]
    return found


def cells(outcome: Outcome) -> list[str]:
    """A row of the table, in the order of COLUMNS."""
    row = outcome.row
    if row is None:
        return unmeasured(outcome, COLUMNS)
    plan: Mapping[str, Any] = row.get("planned") or {}
    setting = [row["size"], f"{row['batch']} x {row['length']}", *(["checkpointing"] if row["checkpointing"] else [])]
    return [
        row["engine"] + (" tuned" if row["tuned"] else "") + (" graph" if row["graph"] else ""),
        ", ".join([*setting, "compiled" if row["compiled"] else "eager"]),
        str(row["world"]),
        number(row["step_s"], 4),
        number(plan.get("step_s"), 4),
        number(row["tokens_s"], 0),
        percent(None if row["ratio"] is None else 1 / row["ratio"]),
        percent(row["mfu"]),
        number(row["allocated_gib"], 2),
        number(plan.get("allocated_gib"), 2),
        number(row["reserved_gib"], 2),
    ]


def markdown(outcomes: Sequence[Outcome], origin: Mapping[str, Any]) -> str:
    """The table for benchmarks/README.md, with where it comes from below it."""
    source = f"{origin['card']}, torch {origin['torch']}, {origin['date']}: `{origin['command']}`"
    return "\n".join([*markdown_table(COLUMNS, map(cells, outcomes)), "", f"Commit {origin['commit']}, {source}", ""])


def powers(devices: int) -> list[int]:
    """One, and every power of two up to the number of devices."""
    return [2**n for n in range(devices.bit_length()) if 2**n <= devices]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1b", "7b", "13b"])
    parser.add_argument("--gpus", nargs="+", type=int, help="by default 1, 2, 4, ... up to those of this machine")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--only", help="only rows whose text contains this, and the floors")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--predict", metavar="CARD", help="print what the planner says of so many GPUs, and end")
    add_limits(parser, "scaling", budget=1500.0, timeout=240.0, least=15.0)
    args, args.options = parser.parse_known_args(argv)
    if any(count < 1 for count in args.gpus or ()):
        parser.error("--gpus takes numbers from 1 on")
    return args


def requests_of(args: argparse.Namespace) -> list[str]:
    """The rows to measure, size by size."""
    rows = [row for size in args.sizes for row in rows_of(size, args.gpus, args.engines)]
    return [row for row in rows if args.only is None or args.only in row or row.startswith("floor")]


def predict(args: argparse.Namespace) -> int:
    """Print the planner's table. Exit status 2 where it does not know the card."""
    try:
        rows = list(predicted(args.sizes, args.gpus or [1, 2, 4, 8], args.predict, CHECKPOINTED, LARGE))
    except PlanError as error:
        print(f"--predict: {error}", file=sys.stderr)
        return 2
    print("\n".join(markdown_table(PREDICTED, rows)))
    return 0


def main() -> int:
    args = parse()
    if args.predict is not None:
        return predict(args)
    devices = device_count()
    args.gpus = powers(devices) if args.gpus is None else args.gpus
    args.nproc = max(args.gpus)
    rows = requests_of(args)
    if args.list:
        print("\n".join(shlex.join(shlex.split(row)) for row in rows))
        return 0
    console = Console(width=150)
    outcomes = run(rows, args, console)
    add_ratios(outcomes, SETTING)
    origin = provenance(args, outcomes, "scaling")
    title = f"{origin['card']}, torch {origin['torch']}, commit {origin['commit']}"
    console.print(console_table(title, COLUMNS, map(cells, outcomes)))
    return save(args.output, "scaling", origin, outcomes, markdown(outcomes, origin))


if __name__ == "__main__":
    sys.exit(main())

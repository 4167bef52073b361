"""What benchmarks.moe and benchmarks.long share: rows in processes of their own, a table, and predictions beside.

The ratio is to the floor of the same setting in the same run. `predicted` is the planner's figure for the plan that
ran; with `--predict CARD` nothing runs, and it is that of the plan that would. A row whose loss is not finite fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.compare import device_count, row_ranks, run
from benchmarks.report import (
    Outcome,
    add_ratios,
    console_table,
    markdown_table,
    number,
    percent,
    provenance,
    save,
    unmeasured,
)
from benchmarks.row import Case, predicted
from zeroshard.planner.machine.hardware import Cluster, parse_cluster
from zeroshard.planner.predict.rows import SAFE_SHARE

SETTING = ("layers", "size", "tiles", "batch", "length", "accumulation", "checkpointing", "compiled", "attention")
"""What two rows must share for their ratio to mean something."""
COLUMNS = (
    "engine",
    "setting",
    "s/step",
    "x floor",
    "tokens/s/GPU",
    "MFU",
    "GiB",
    "reserved",
    "host GiB",
    "s/step predicted",
    "GiB predicted",
    "off",
    "loss",
    "init s",
    "in all s",
)
LAPS = ("join_s", "init_s", "first_s", "warm_s", "timed_s", "planned_s")
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""For rows that nearly fill a card: what is not used between sizes is given back. A variable of the caller counts."""
Describe = Callable[[Mapping[str, Any]], str]


def measure(name: str, requests: Sequence[str], args: argparse.Namespace, describe: Describe, module: str) -> int:
    """Measure the rows, print and save the table; 1 where a row failed."""
    outcomes = measured(requests, args, module, Console(width=180))
    origin = provenance(args, outcomes, name)
    title = f"{origin['world']} x {origin['card']}, torch {origin['torch']}, commit {origin['commit']}"
    made = [cells(outcome, describe) for outcome in outcomes]
    Console(width=220).print(console_table(title, COLUMNS, made))
    text = "\n".join([*markdown_table(COLUMNS, made), "", f"{title}, {origin['date']}: `{origin['command']}`", ""])
    print(text)
    status = save(args.output, name, origin, outcomes, text)
    return 1 if any(outcome.error or not _finite(outcome) for outcome in outcomes) else status


def measured(
    requests: Sequence[str], args: argparse.Namespace, module: str, say: Console | None = None
) -> list[Outcome]:
    """Measure each row in processes of its own, with its ratio to the floor before it.

    `say` is told all of a row when it comes, so that a run that is broken off leaves what it has found.
    """
    more = {name: os.environ.get(name, value) for name, value in ALLOCATOR.items()}
    quiet, deadline = Console(quiet=True), time.monotonic() + args.budget
    outcomes: list[Outcome] = []
    for request in requests:
        left = argparse.Namespace(**{**vars(args), "budget": deadline - time.monotonic()})
        outcomes += run([request], left, say or quiet, module=module, environment=lambda _: more)
        add_ratios(outcomes, SETTING)
        row = outcomes[-1].row
        if row is not None and say is not None:
            print(f"{json.dumps(row)}\n{laps(row)}", flush=True)
    return outcomes


def _finite(outcome: Outcome) -> bool:
    return outcome.row is not None and math.isfinite(outcome.row["loss"])


def laps(row: Mapping[str, Any]) -> str:
    """Where the time of a row's processes went."""
    return ", ".join(f"{name.removesuffix('_s')} {row[name]:g} s" for name in LAPS if name in row)


def cells(outcome: Outcome, describe: Describe) -> list[str]:
    """A row of the table, in the order of COLUMNS."""
    row = outcome.row
    if row is None:
        return unmeasured(outcome, COLUMNS)
    plan = row.get("planned") or {}
    return [
        row["engine"] + "".join(f" {axis} {row[axis]}" for axis in ("ep", "sp") if row[axis] > 1),
        describe(row),
        number(row["step_s"], 4),
        number(row["ratio"], 3),
        number(row["tokens_s"], 0),
        percent(row["mfu"]),
        number(row["allocated_gib"], 2),
        number(row["reserved_gib"], 2),
        number(row["host_gib"], 1),
        number(plan.get("step_s"), 4),
        number(plan.get("allocated_gib"), 2),
        _off(plan.get("allocated_gib"), row["allocated_gib"]),
        number(row["loss"], 3),
        number(row["init_s"], 1),
        number(outcome.seconds, 0),
    ]


def _off(expected: float | None, found: float | None) -> str:
    return "" if expected is None or not found else f"{100 * (expected / found - 1):+.1f}%"


def foretell(requests: Sequence[str], args: argparse.Namespace, case_of: Callable[[list[str]], Case]) -> int:
    """Print the planner's figures for the rows of zeroshard on `args.predict`; nothing runs."""
    columns = ("row", "ranks", "s/step", "of which compute", "floor", "tokens/s/GPU", "GiB", "with slack", "host GiB")
    lines: list[list[str]] = []
    for request in requests:
        words, nproc = row_ranks(request, args.nproc)
        if not words[0].startswith("zeroshard"):
            continue
        found = predicted(case_of([*words, *args.options]), card_of(args.predict, nproc))
        lines.append(
            [
                request,
                str(nproc),
                number(found["step_s"], 3),
                number(found["bounds"]["compute"], 3),
                number(found["floor_s"], 3),
                number(found["tokens_s"], 0),
                number(found["allocated_gib"], 2),
                number(found["total_gib"], 1),
                number(found["host_gib"], 1),
            ]
        )
    print("\n".join(markdown_table(columns, lines)))
    return 0


def card_of(name: str, nproc: int) -> Cluster:
    """So many of a card in one node."""
    return parse_cluster(f"{nproc}x{name}", per_node=nproc)


def most_layers(case_of: Callable[[int], Case], cluster: Cluster, limit: int) -> list[tuple[int, dict[str, Any]]]:
    """The figures of more and more layers, as long as they fit with a little room, `limit` at most."""
    found: list[tuple[int, dict[str, Any]]] = []
    for layers in range(1, limit + 1):
        figures = predicted(case_of(layers), cluster)
        if figures["total_gib"] * 2**30 > SAFE_SHARE * cluster.gpu.memory:
            break
        found.append((layers, figures))
    return found


def ranks_of(args: argparse.Namespace) -> int:
    """The ranks that the command line says, or one for each GPU."""
    return device_count() if args.nproc is None else args.nproc


def only(requests: Sequence[str], text: str | None) -> list[str]:
    """The rows with this text, and the floors; all without one."""
    kept = [row for row in requests if text is None or text in row or shlex.split(row)[0] == "floor"]
    return list(dict.fromkeys(kept))

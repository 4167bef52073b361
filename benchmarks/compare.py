"""Measures a list of engines and settings on this machine, one after the other, and puts them beside the floor.

    python -m benchmarks.compare --preset quick-1b [--nproc 2] [--budget 300] [--output FOLDER]
    python -m benchmarks.compare --run "floor" --run "zeroshard3 --batch 2" --run "fsdp2 --batch 2 --tuned"

Every row is a measurement of benchmarks.train in processes of its own, so that no engine inherits another's memory or
streams. A row that has no time left is left out and said so; a row that fails or is not installed leaves the others
alone. The ratio is to the floor of the same run with the same setting: the same machine, minutes apart. Cards get warm
and slow down by some tenths of a percent: with `--floor-again` each floor is measured after the rows behind it too, and
the ratio is to the mean.

    quick-1b   floor, FSDP2, zeroshard at stages 3, 2, 1 and in a graph; then floor, FSDP2 and stage 3 compiled
    mb1        one sequence a GPU, where the host decides: floor, FSDP2, zeroshard at stages 3, 2, 1 and in a graph
    7b         activation checkpointing: floor, FSDP2 plain and tuned, zeroshard 3, eager; then compiled
    offload-7b optimizer's state in host memory: zeroshard 3 in each way, FSDP2 and DeepSpeed beside
    offload-1b the same at stage 2, made for one GPU: --nproc 1
    offload-limits  beside what the plan says: 6.7e9 parameters with all state and all parameters on the host on one
               GPU; two GPUs of which 32 GiB may be used, beside all state on the host; the largest model of one GPU
    peers      DDP, FSDP2 in three forms, DeepSpeed plain and tuned at stages 3, 2, 1, zeroshard at stages 3, 2, 1

A row may say on how many ranks it runs (`--nproc 1`). Rows with state on the host get all cores, divided between the
ranks, unless OMP_NUM_THREADS says otherwise.

Options after the preset apply to each of its rows: `--size tiny --length 64` tries a preset on a CPU. The output folder
gets compare.json with everything and compare.md with the rows of benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.ranks import run_ranks
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

STAGES = ("zeroshard3", "zeroshard2", "zeroshard1")
LARGEST_SHARE = 0.75
"""Share of the optimizer's state of `14b` that goes to the host: benchmarks.largest."""
DEEPSPEED = ("deepspeed3", "deepspeed2", "deepspeed1")
PRESETS: dict[str, Sequence[str]] = {
    "quick-1b": [
        *("floor", "fsdp2", *STAGES, "zeroshard3 --graph", "zeroshard1 --tuned --graph"),
        *(f"{name} --compile" for name in ("floor", "fsdp2", "zeroshard3", "zeroshard3 --graph")),
    ],
    "mb1": [
        f"{name} --batch 1"
        for name in ("floor", "floor --graph", "fsdp2", "fsdp2 --tuned", *STAGES, "zeroshard3 --graph")
    ],
    "7b": [
        f"{name} --size 7b --checkpointing --steps 4 --warmup 3"
        for name in (
            *("floor", "fsdp2", "fsdp2 --tuned", "zeroshard3", "zeroshard3 --graph"),
            *("floor --compile", "fsdp2 --compile", "zeroshard3 --compile"),
        )
    ],
    "offload-7b": [
        f"{name} --size 7b --checkpointing --steps 2 --warmup 2"
        for name in (
            "floor",
            "zeroshard3",
            *(f"zeroshard3 --offload {way}" for way in ("streamed", "processor", "streamed --clip 0", "param")),
            "zeroshard3 --offload streamed --host-share 0.5",
            "floor --accumulation 8",
            "zeroshard3 --offload streamed --accumulation 8",
            "fsdp2 --offload streamed",
            "deepspeed3 --offload streamed",
        )
    ],
    "offload-limits": [
        f"{name} --checkpointing --steps 2 --warmup 2"
        for name in (
            "floor --size 7b",
            *(f"zeroshard3 --size 7b --offload {way} --plan --nproc 1" for way in ("param", "param-processor")),
            "zeroshard3 --size 7b --offload auto --cap-gib 32 --plan --nproc 2",
            "zeroshard3 --size 7b --offload processor --plan --nproc 2",
            f"zeroshard3 --size 14b --offload streamed --host-share {LARGEST_SHARE} --plan --repetitions 2 --nproc 1",
        )
    ],
    "offload-1b": ["floor", *(f"zeroshard2 --offload {way}" for way in ("streamed", "processor"))],
    "peers": [
        *("floor", "ddp", "fsdp2", "fsdp2 --tuned", "fsdp2-z2", *DEEPSPEED),
        *(f"{name} --tuned" for name in DEEPSPEED),
        *STAGES,
    ],
}
SETTING = ("size", "batch", "accumulation", "checkpointing", "compiled", "length")  # a floor has no ranks
"""What two rows must share for their ratio to mean something."""
MARKDOWN = (
    "engine",
    "setting",
    "s/step",
    "x floor",
    "tokens/s/GPU",
    "MFU",
    "GiB",
    "reserved",
    "host GiB",
    "init s",
    "host s",
)


def run(
    requests: Sequence[str],
    args: argparse.Namespace,
    say: Console,
    *,
    module: str = "benchmarks.train",
    environment: Callable[[str], Mapping[str, str]] | None = None,
) -> list[Outcome]:
    """Measure each of `requests` ("engine --option ...") by `module`, as long as the budget lasts.

    `environment` says which variables the ranks of an engine get beside those of this process.
    """
    deadline = time.monotonic() + args.budget
    outcomes: list[Outcome] = []
    for request in requests:
        left = deadline - time.monotonic()
        if left < args.least:
            outcomes.append(Outcome(request, error="left out: no time left in the budget"))
            continue
        words, nproc = row_ranks(request, args.nproc)
        arguments = ["--engine", *words, *args.options]
        more = dict({} if environment is None else environment(words[0]))
        if "--offload" in words and "OMP_NUM_THREADS" not in os.environ:
            more["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // nproc))
        seconds = min(args.timeout, left)
        done = run_ranks(module, arguments, nproc=nproc, timeout=seconds, environment=more)
        outcome = Outcome(request, _last_json(done.output), done.error, round(done.seconds, 1), done.log)
        if outcome.row is not None and "step_s" not in outcome.row:
            outcome.error, outcome.row = outcome.row.get("error", "no figure"), None
        outcomes.append(outcome)
        shown = "failed" if outcome.row is None else f"{outcome.row['step_s']:.4f} s/step"
        say.print(f"{request}: {shown} ({outcome.seconds} s in all)", highlight=False)
        if outcome.error is not None:
            say.print(f"{outcome.error}\n{outcome.log}", markup=False, highlight=False)
        elif outcome.row is not None and outcome.row.get("account"):
            say.print(outcome.log, markup=False, highlight=False)
        if outcome.row is not None and outcome.row.get("sync_error"):
            say.print(f"a step synchronizes: {outcome.row['sync_error']}", markup=False, highlight=False)
    return outcomes


def row_ranks(request: str, otherwise: int) -> tuple[list[str], int]:
    """The words of a row without its own number of ranks, and that number."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--nproc", type=int, default=otherwise)
    found, words = own.parse_known_args(shlex.split(request))
    return words, found.nproc


def _last_json(output: str) -> dict[str, Any] | None:
    """The last line of `output` that is a JSON object; libraries print lines of their own."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue
    return None


def cells(outcome: Outcome) -> list[str]:
    """A row of the table, in the order of MARKDOWN."""
    row = outcome.row
    if row is None:
        return unmeasured(outcome, MARKDOWN)
    marks = [row["engine"], *(mark for mark in ("tuned", "graph") if row[mark])]
    engine = " ".join([*marks, *([f"spare {row['spare']:g}"] if row["spare"] else [])])
    numbers = [
        number(row["step_s"], 4),
        number(row["ratio"], 3),
        number(row["tokens_s"], 0),
        percent(row["mfu"]),
        number(row["allocated_gib"], 2),
        number(row["reserved_gib"], 2),
        number(row["host_gib"], 1),
        number(row["init_s"], 1),
        number(row["host_s"], 4),
    ]
    return [engine, _describe(row), *numbers]


def _describe(row: dict[str, Any]) -> str:
    parts = [row["size"], f"{row['batch']} x {row['length']}"]
    parts += [f"{row['accumulation']} micro-batches"] if row["accumulation"] > 1 else []
    parts += ["checkpointing"] if row["checkpointing"] else []
    parts += [f"offload {row['offload']} {row['host_share']:g}"] if row["offload"] != "none" else []
    parts += [f"{row['cap_gib']:g} GiB of the card"] if row.get("cap_gib") else []
    parts += ["no clipping"] if not row["clip"] else []
    return ", ".join([*parts, "compiled" if row["compiled"] else "eager"])


def markdown(outcomes: Sequence[Outcome], origin: dict[str, Any]) -> str:
    """The table of a run for benchmarks/README.md, with where it comes from below it."""
    lines = markdown_table(MARKDOWN, map(cells, outcomes)) + planned_table(outcomes)
    card = f"{origin['world']} x {origin['card']}, torch {origin['torch']}"
    return "\n".join([*lines, "", f"Commit {origin['commit']}, {card}, {origin['date']}: `{origin['command']}`", ""])


PLANNED = (
    "plan",
    "setting",
    "ranks",
    "share on host",
    "s/step: predicted",
    "measured",
    "bound",
    "x bound",
    "tokens/s/GPU: predicted",
    "measured",
    "GiB: predicted",
    "measured",
    "host GiB: predicted",
    "measured",
    "of it before",
)


def planned_cells(row: Mapping[str, Any]) -> list[str]:
    """What the plan says beside what was measured, in the order of PLANNED."""
    plan = row["planned"]
    return [
        f"stage {plan['stage']}" + ("" if plan["update"] is None else f", {plan['update']}"),
        _describe(dict(row)),
        str(row["world"]),
        number(plan["share_on_host"], 2),
        number(plan["step_s"], 3),
        number(row["step_s"], 3),
        f"{plan['bound_s']:.3f} ({plan['bound']})",
        number(row["step_s"] / plan["bound_s"], 2),
        number(plan["tokens_s"], 0),
        number(row["tokens_s"], 0),
        number(plan["allocated_gib"], 2),
        number(row["allocated_gib"], 2),
        number(plan["host_gib"], 1),
        number(row["host_gib"], 1),
        number(row["host_before_gib"], 1),
    ]


def planned_table(outcomes: Sequence[Outcome]) -> list[str]:
    """Markdown of the rows that have a prediction; nothing where none has."""
    rows = [o.row for o in outcomes if o.row is not None and o.row.get("planned")]
    return ["", *markdown_table(PLANNED, map(planned_cells, rows))] if rows else []


def device_count() -> int:
    """The GPUs of this machine, or two ranks on the CPU; asked in a process of its own, to leave no context behind."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(done.stdout.strip() or 0) or 2


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, action="append", default=[], help="may be repeated")
    parser.add_argument("--run", action="append", default=[], metavar="ROW", help='"ENGINE [options of train]"')
    parser.add_argument("--only", help="only rows whose text contains this, and the floors")
    parser.add_argument("--floor-again", action="store_true", help="measure floors before and after the other rows")
    parser.add_argument("--nproc", type=int, help="ranks; by default one for each GPU")
    add_limits(parser, "compare", budget=540.0, timeout=180.0, least=15.0)
    args, args.options = parser.parse_known_args(argv)
    if not args.preset and not args.run:
        parser.error("give --preset or --run")
    return args


def requests_of(args: argparse.Namespace) -> list[str]:
    """The rows to measure, each once, in the order given."""
    rows = [row for preset in args.preset for row in PRESETS[preset]] + args.run
    kept = [row for row in rows if args.only is None or args.only in row or row.startswith("floor")]
    once = list(dict.fromkeys(kept))
    return with_floors_again(once) if args.floor_again else once


def with_floors_again(rows: Iterable[str]) -> list[str]:
    """The rows, and each floor once more before the next one or at the end."""
    found: list[str] = []
    waiting: list[str] = []
    for row in rows:
        if row.startswith("floor") and "--graph" not in row:
            found += waiting
            waiting = [row]
        found.append(row)
    return found + waiting


def main() -> int:
    args = parse()
    args.nproc = device_count() if args.nproc is None else args.nproc
    console = Console(width=150)
    outcomes = run(requests_of(args), args, console)
    add_ratios(outcomes, SETTING)
    origin = provenance(args, outcomes, "compare")
    title = f"{origin['world']} x {origin['card']}, torch {origin['torch']}, commit {origin['commit']}"
    console.print(console_table(title, MARKDOWN, map(cells, outcomes)))
    print("\n".join(planned_table(outcomes)))
    return save(args.output, "compare", origin, outcomes, markdown(outcomes, origin))


if __name__ == "__main__":
    sys.exit(main())

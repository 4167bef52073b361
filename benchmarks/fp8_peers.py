"""fp8 of zeroshard beside torchao's on FSDP2, and both beside their bf16, in one run on real text.

    python -m benchmarks fp8-peers [--nproc 2] [--size 1b] [--batch 4] [--tuned] [--output FOLDER]
    python -m benchmarks fp8-peers --nproc 2 --eager --size tiny --length 64 --fp8-layers blocks     without a GPU

Each row is a run of benchmarks.train in processes of its own, with blocks compiled, from the same weights on the same
text, so its loss falls: the table has the first and the last one, and a row whose loss did not fall fails the run.
torchao is not needed by zeroshard. It is found on PYTHONPATH; its unpacked wheel will do, since nothing of its compiled
part is used (`pip download --no-deps torchao && unzip -d FOLDER torchao*.whl`). Without it its rows say so.

    fsdp2 --fp8 tensorwise       torchao's tensorwise recipe, with enable_fsdp_float8_all_gather and scales made ahead
    x fsdp2, x bf16              steps per second beside FSDP2 in bf16, and beside the same engine in bf16
    gathered, reduced            MiB of a step's gathers and reductions on a rank (benchmarks.wire)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.compare import device_count, run
from benchmarks.report import Outcome, add_limits, console_table, markdown_table, number, provenance, save, unmeasured

ROWS = (
    "fsdp2",
    "fsdp2 --fp8 tensorwise",
    "zeroshard3",
    "zeroshard3 --fp8 tensorwise",
    "zeroshard3 --fp8 rowwise",
    "zeroshard3 --fp8 blockwise",
)
COLUMNS = (
    "engine",
    "products",
    "ms/step",
    "x fsdp2",
    "x bf16",
    "tokens/s/GPU",
    "GiB",
    "gathered MiB",
    "reduced MiB",
    "first loss",
    "last loss",
)


def add_ratios(outcomes: Sequence[Outcome]) -> None:
    """Add to each row how many times as fast it is as FSDP2 in bf16, and as its own engine in bf16."""
    in_bf16 = {
        outcome.row["engine"]: outcome.row["step_s"]
        for outcome in outcomes
        if outcome.row is not None and outcome.row["fp8"] == "none"
    }
    for row in (outcome.row for outcome in outcomes):
        if row is not None:
            row["of_fsdp2"] = _times(in_bf16.get("fsdp2"), row["step_s"])
            row["of_bf16"] = _times(in_bf16.get(row["engine"]), row["step_s"])


def _times(seconds: float | None, of: float) -> float | None:
    return None if seconds is None else round(seconds / of, 3)


def cells(outcome: Outcome) -> list[str]:
    """A row of the table, in the order of COLUMNS."""
    row = outcome.row
    if row is None:
        return unmeasured(outcome, COLUMNS)
    return [
        row["engine"] + (" tuned" if row["tuned"] else ""),
        "bf16" if row["fp8"] == "none" else row["fp8"],
        number(row["step_s"] * 1e3, 2),
        number(row["of_fsdp2"], 3),
        number(row["of_bf16"], 3),
        number(row["tokens_s"], 0),
        number(row["allocated_gib"], 2),
        number(row["gathered_mib"], 1),
        number(row["reduced_mib"], 1),
        number(row["first_loss"], 4),
        number(row["loss"], 4),
    ]


def markdown(outcomes: Sequence[Outcome], origin: Mapping[str, Any]) -> str:
    """The table with where it comes from below it."""
    row = next((outcome.row for outcome in outcomes if outcome.row is not None), {})
    what = f"{row.get('size')}, {row.get('batch')} x {row.get('length')} tokens" if row else ""
    card = f"{origin['world']} x {origin['card']}, torch {origin['torch']}"
    where = f"{what}. Commit {origin['commit']}, {card}, {origin['date']}: `{origin['command']}`"
    return "\n".join([*markdown_table(COLUMNS, map(cells, outcomes)), "", where, ""])


def risen(outcomes: Sequence[Outcome]) -> list[str]:
    """The rows whose loss did not fall."""
    return [o.request for o in outcomes if o.row is not None and not o.row["loss"] < o.row["first_loss"]]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="ROW", help='"ENGINE [options of train]"')
    parser.add_argument("--nproc", type=int, help="ranks; by default one for each GPU")
    parser.add_argument("--eager", action="store_true", help="don't compile blocks")
    add_limits(parser, "fp8_peers", budget=560.0, timeout=240.0, least=20.0)
    args, args.options = parser.parse_known_args(argv)
    args.options += ["--text", "--wire", *([] if args.eager else ["--compile"])]
    return args


def main() -> int:
    args = parse()
    args.nproc = device_count() if args.nproc is None else args.nproc
    console = Console(width=160)
    outcomes = run(args.rows, args, console)
    add_ratios(outcomes)
    origin = provenance(args, outcomes, "fp8_peers")
    console.print(console_table("fp8 beside bf16", COLUMNS, map(cells, outcomes)))
    text = markdown(outcomes, origin)
    print(text)
    status = save(args.output, "fp8_peers", origin, outcomes, text)
    for request in risen(outcomes):
        print(f"{request}: the loss did not fall", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

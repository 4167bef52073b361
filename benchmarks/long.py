"""Steps of one long sequence: memory beside the planner's prediction, which is to be within 3 %.

    python -m benchmarks long                                       # 1b, 131072 tokens, one GPU
    python -m benchmarks long --preset 8b --nproc 2                 # 8b, 131072 and 524288 tokens over two ranks
    python -m benchmarks long --preset 1b --preset 8b --predict H200-141GB --nproc 2    # nothing runs
    python -m benchmarks long --size tiny --length 256 --loss-tile 64 --ffn-tile 128    to try it without a GPU

Llama's shape at ZeRO stage 3; blocks are checkpointed, the feed-forward goes in tiles of 16384 tokens and the loss in
tiles of 2048, so that logits never stand whole. Over several ranks each has a part of the sequence, and attention
exchanges heads (Ulysses).

    1b    1.10e9 parameters, 131072 tokens on one GPU
    8b    8.03e9 (4096, 32 layers, 32 heads and 8 of keys, 14336, vocabulary 128256), on two ranks of one sequence;
          with 524288 tokens the optimizer's state is in host memory, and one step after a short one is all there is

Options that are not known here go to every row (benchmarks.long_row): `--attention cudnn`, `--warmup 0`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import long_row
from benchmarks.report import add_limits
from benchmarks.row import Case
from benchmarks.rows import foretell, measure, only, ranks_of

PRESETS = {
    "1b": ("zeroshard3 --nproc 1",),
    "8b": (
        "zeroshard3 --size 8b --sp 2 --nproc 2",
        "zeroshard3 --size 8b --sp 2 --nproc 2 --length 524288 --offload streamed --warmup 0 --repetitions 1",
    ),
}


def case_of(words: Sequence[str]) -> Case:
    """The case of a row's words, its engine first."""
    return long_row.case_of(long_row.parse(["--engine", *words]))


def describe(row: Mapping[str, Any]) -> str:
    """What was trained, and how."""
    parts = [f"{row['size']}, {row['length']} tokens", f"tiles of {row['loss_tile']} and {row['ffn_tile']}"]
    parts += [f"attention {row['attention']}"] if row["attention"] != "default" else []
    parts += [f"{row['offload']} {row['host_share']:g}"] if row["offload"] != "none" else []
    return ", ".join([*parts, "compiled" if row["compiled"] else "eager"])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, action="append", help="may be repeated; 1b if there is none")
    parser.add_argument("--run", action="append", default=[], metavar="ROW", help='"ENGINE [options of long_row]"')
    parser.add_argument("--only", help="only rows whose text contains this, and the floors")
    parser.add_argument("--nproc", type=int, help="ranks of rows that do not say; by default one for each GPU")
    parser.add_argument("--predict", metavar="CARD", help="what the planner says of the rows; nothing runs")
    add_limits(parser, "long", budget=590.0, timeout=590.0, least=60.0)
    args, args.options = parser.parse_known_args(argv)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.nproc = ranks_of(args)
    presets = args.preset or ([] if args.run else ["1b"])
    rows = only([*(row for preset in presets for row in PRESETS[preset]), *args.run], args.only)
    if args.predict is not None:
        return foretell(rows, args, case_of)
    return measure("long", rows, args, describe, "benchmarks.long_row")


if __name__ == "__main__":
    sys.exit(main())

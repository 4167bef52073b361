"""A mixture of experts of Qwen3-30B-A3B's shape, from transformers' config alone: zeroshard and FSDP2 beside the floor.

    python -m benchmarks moe                                    # all GPUs; --nproc 1: one
    python -m benchmarks moe --preset offload --nproc 2         # most of the 48 layers, the optimizer's state on hosts
    python -m benchmarks moe --most [--card H200-141GB]         # how many layers fit, by the planner; nothing runs
    python -m benchmarks moe --predict H200-141GB --nproc 1     # what the planner says of the rows; nothing runs
    python -m benchmarks moe --size tiny --layers 2 --batch 2 --length 32 --nproc 2      to try it without a GPU

The model is transformers' Qwen3MoeForCausalLM: hidden 2048, 128 experts 768 wide of which each token meets 8, 32 heads
of queries and 4 of keys, 128 wide, with norms, vocabulary 151936, and ten layers: as many as fit on one card of 139 GiB
with FSDP2's fp32 state. Experts are torch's grouped_mm, attention is SDPA. Blocks are checkpointed, and head and loss
see the tokens in tiles, in all rows alike; `--no-checkpointing --tiles 0` is the plain loop, in which fewer tokens a
step fit, so that the update of experts which few tokens met counts for more.

    speed      floor, zeroshard 3, FSDP2, eager and compiled; on several ranks zeroshard with the experts over all, too
    offload    zeroshard 3 on two GPUs with a part of the optimizer's state in the memory of their host, of which two
               ranks take up to 206 GiB: 40 layers, all 48, and 36 eager. Goal: 12,000 tokens a second and GPU

The floor is forward and backward of the same model in bf16 alone. Goal: at most 1.08 of it. Options that are not known
here go to every row (benchmarks.moe_row): `--layers 12`, `--batch 8`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import moe_row
from benchmarks.report import add_limits
from benchmarks.row import Case
from benchmarks.rows import card_of, foretell, measure, most_layers, only, ranks_of

ALL_LAYERS = 48
PRESETS = ("speed", "offload")
ON_HOST = "--offload streamed --warmup 2 --steps 2 --repetitions 1"
OFFLOAD = (
    f"zeroshard3 --layers 40 --host-share 0.5 --batch 40 --compile {ON_HOST}",
    f"zeroshard3 --layers 48 --host-share 0.6 --batch 32 --compile {ON_HOST}",
    f"zeroshard3 --layers 36 --host-share 0.5 --batch 48 {ON_HOST}",
)
"""By the planner the fastest of those that two H200 and 216 GiB of host memory hold."""


def rows_of(preset: str, nproc: int) -> list[str]:
    """The rows of a preset on so many ranks."""
    if preset == "offload":
        return list(OFFLOAD)
    ours = ["zeroshard3", *([f"zeroshard3 --ep {nproc}"] if nproc > 1 else [])]
    return ["floor", *ours, "fsdp2", "floor --compile", *(f"{row} --compile" for row in ours)]


def case_of(words: Sequence[str]) -> Case:
    """The case of a row's words, its engine first."""
    return moe_row.case_of(moe_row.parse(["--engine", *words]))


def describe(row: Mapping[str, Any]) -> str:
    """What was trained, and how."""
    parts = [f"{row['layers']} layers, {row['batch']} x {row['length']}"]
    parts += [f"{row['accumulation']} micro-batches"] if row["accumulation"] > 1 else []
    parts += ["checkpointing"] if row["checkpointing"] else []
    parts += [f"{row['tiles']} tiles"] if row["tiles"] else []
    parts += [f"{row['offload']} {row['host_share']:g}"] if row["offload"] != "none" else []
    return ", ".join([*parts, "compiled" if row["compiled"] else "eager"])


def print_most(args: argparse.Namespace) -> int:
    """How many layers the planner says fit."""
    found = most_layers(
        lambda layers: case_of(["zeroshard3", *args.options, "--layers", str(layers)]),
        card_of(args.card, args.nproc),
        ALL_LAYERS,
    )
    for layers, figures in found:
        memory = f"{figures['allocated_gib']:.1f} GiB, {figures['total_gib']:.1f} with slack"
        speed = f"{figures['step_s']:.3f} s/step, {figures['tokens_s']} tokens/s/GPU"
        print(f"{layers} layers: {memory}; {speed}")
    print(f"{len(found)} layers fit {args.nproc} x {args.card}" if found else "not one layer fits")
    return 0 if found else 1


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, action="append", help="may be repeated; speed if there is none")
    parser.add_argument("--run", action="append", default=[], metavar="ROW", help='"ENGINE [options of moe_row]"')
    parser.add_argument("--only", help="only rows whose text contains this, and the floors")
    parser.add_argument("--nproc", type=int, help="ranks; by default one for each GPU")
    parser.add_argument("--most", action="store_true", help="how many layers fit --card; nothing runs")
    parser.add_argument("--card", default="H200-141GB", help="for --most")
    parser.add_argument("--predict", metavar="CARD", help="what the planner says of the rows; nothing runs")
    add_limits(parser, "moe", budget=580.0, timeout=300.0, least=20.0)
    args, args.options = parser.parse_known_args(argv)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.nproc = ranks_of(args)
    if args.most:
        return print_most(args)
    presets = args.preset or ([] if args.run else ["speed"])
    rows = only([*(row for preset in presets for row in rows_of(preset, args.nproc)), *args.run], args.only)
    if args.predict is not None:
        return foretell(rows, args, case_of)
    return measure("moe", rows, args, describe, "benchmarks.moe_row")


if __name__ == "__main__":
    sys.exit(main())

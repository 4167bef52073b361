"""One row of benchmarks.long: one sequence, one JSON line from rank 0.

    python -m benchmarks.long_row --engine zeroshard3 --size 1b --length 131072
    torchrun --nproc-per-node 2 -m benchmarks.long_row --engine zeroshard3 --size 8b --sp 2
    python -m benchmarks.long_row --engine zeroshard3 --size tiny --length 256       without a GPU

`--sp N`: N neighbouring ranks have parts of the sequence. The first step, in which libraries start and zeroshard learns
the order of units, is one of a short sequence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.long_model import KERNELS, SIZES, Long, blocks, fill, place
from benchmarks.row import Case, add_options, run

LENGTH, FIRST_LENGTH = 131072, 8192
LOSS_TILE, FFN_TILE = 2048, 16384


def case_of(args: argparse.Namespace) -> Case:
    """What the options ask for."""
    model = Long(args.size, args.loss_tile, args.ffn_tile, args.attention)
    return Case(
        engine=args.engine,
        axis="sp",
        parts=args.sp,
        samples=1,
        length=args.length,
        first_length=min(args.length, args.first_length),
        vocabulary=model.shape.vocabulary,
        accumulation=args.accumulation,
        checkpointing=True,
        compiled=args.compile,
        offload=args.offload,
        host_share=args.host_share,
        flops=model.shape.flops_per_token(args.length),
        make=model.make,
        fill=fill,
        place=place,
        blocks=blocks,
        work=lambda: model.work(args.length, args.sp),
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--sp", type=int, default=1, help="ranks that have parts of the sequence")
    parser.add_argument("--first-length", type=int, default=FIRST_LENGTH, help="tokens in the first step")
    parser.add_argument("--loss-tile", type=int, default=LOSS_TILE, help="tokens of which logits stand at a time")
    parser.add_argument("--ffn-tile", type=int, default=FFN_TILE, help="tokens that pass the feed-forward at a time")
    parser.add_argument("--attention", choices=KERNELS, default="default", help="whose kernels come first")
    add_options(parser, length=LENGTH, warmup=1, steps=1, repetitions=2)
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    names = ("size", "attention", "loss_tile", "ffn_tile")
    return run(args, lambda: case_of(args), {name: getattr(args, name) for name in names})


if __name__ == "__main__":
    sys.exit(main())

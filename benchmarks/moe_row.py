"""One row of benchmarks.moe: one engine on a mixture of experts, one JSON line from rank 0.

    torchrun --nproc-per-node 2 -m benchmarks.moe_row --engine zeroshard3 --ep 2
    python -m benchmarks.moe_row --engine floor --size tiny --layers 2 --batch 2 --length 32       without a GPU

`--ep N`: N neighbouring ranks divide the experts, and send each other tokens; each still reads its own data. Each rank
then builds the whole model in bf16 before it keeps its part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.moe_model import SIZES, Moe, blocks, fill, import_model
from benchmarks.row import Case, add_options, run

LAYERS, BATCH, LENGTH, TILES = 10, 16, 2048, 16


def case_of(args: argparse.Namespace) -> Case:
    """What the options ask for."""
    model = Moe(args.size, args.layers, not args.no_checkpointing, args.tiles)
    return Case(
        engine=args.engine,
        axis="ep",
        parts=args.ep,
        samples=args.batch,
        length=args.length,
        first_length=args.length,
        vocabulary=model.shape.vocabulary,
        accumulation=args.accumulation,
        checkpointing=model.checkpointing,
        compiled=args.compile,
        offload=args.offload,
        host_share=args.host_share,
        flops=model.shape.flops_per_token(args.layers, args.length),
        make=model.make,
        fill=fill,
        place=lambda *_: None,
        blocks=blocks,
        work=lambda: model.work(args.batch, args.length, args.ep),
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="30b-a3b")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of 48")
    parser.add_argument("--ep", type=int, default=1, help="ranks that divide the experts")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations of all blocks")
    parser.add_argument("--tiles", type=int, default=TILES, help="of the tokens, for head and loss; 0: all at once")
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences per micro-batch and rank")
    add_options(parser, length=LENGTH, warmup=3, steps=3, repetitions=2)
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    import_model()
    return run(args, lambda: case_of(args), {"size": args.size, "layers": args.layers, "tiles": args.tiles})


if __name__ == "__main__":
    sys.exit(main())

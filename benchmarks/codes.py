"""How fast values become codes and codes values, beside a copy of as many bytes on the same device.

    python -m benchmarks codes [--gib 1] [--repetitions 20] [--json]

A row is one use: what is read and written is counted as the plan's legs have it (values, codes, scales, the error that
is kept), and set beside the rate of a plain copy that reads and writes as many bytes in all. On a GPU kernels are timed
by events; without one it is native code on one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from zeroshard.engine.memory.block_codes import decode, decode_sum, encode
from zeroshard.plan.hops import BETWEEN, WITHIN, Feedback
from zeroshard.plan.placement import DIFFERENCE_CODES, GATHER_CODES, LOW_GATHER_CODES, Blocks

GIB = 2**30
RANKS = 8


@dataclass(frozen=True)
class Row:
    """One use of codes.

    Attributes:
        nbytes: read and written in all.
    """

    name: str
    nbytes: int
    run: Callable[[], None]


def rows(numel: int, device: torch.device) -> list[Row]:
    values = torch.randn(numel, device=device).bfloat16()
    error = torch.zeros_like(values)
    found: list[Row] = []
    uses = {
        "gathered in 8 bits": GATHER_CODES,
        "gathered in 4 bits": LOW_GATHER_CODES,
        "difference in 4 bits": DIFFERENCE_CODES,
        "sum within, 8 bits": WITHIN,
        "sum of nodes, 4 bits": BETWEEN,
    }
    for name, blocks in uses.items():
        nbytes = _record_nbytes(numel, blocks)
        records = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        if name.startswith("sum"):
            part = torch.zeros(numel // RANKS, device=device)
            kept = error if blocks is BETWEEN else None
            found += [
                Row(
                    f"{name}: encode",
                    (2 if kept is None else 6) * numel + nbytes,
                    _encode(values, records, blocks, kept),
                ),
                Row(f"{name}: decode and add 8 ranks", nbytes + 4 * numel // RANKS, _sum(records, part, blocks)),
            ]
        else:
            found += [
                Row(f"{name}: encode", 2 * numel + nbytes, _encode(values, records, blocks, None)),
                Row(f"{name}: decode", 2 * numel + nbytes, _decode(records, values, blocks)),
            ]
    return found


def _record_nbytes(numel: int, blocks: Blocks) -> int:
    return blocks.code_nbytes(numel) + blocks.scale_nbytes(numel)


def _encode(
    values: torch.Tensor, records: torch.Tensor, blocks: Blocks, error: torch.Tensor | None
) -> Callable[[], None]:
    feedback = None if error is None else Feedback()
    return lambda: encode(values, records, blocks, ranks=RANKS, error=error, feedback=feedback)


def _decode(records: torch.Tensor, values: torch.Tensor, blocks: Blocks) -> Callable[[], None]:
    return lambda: decode(records, RANKS, values, blocks)


def _sum(records: torch.Tensor, part: torch.Tensor, blocks: Blocks) -> Callable[[], None]:
    return lambda: decode_sum(records, RANKS, part, blocks, add=False)


def seconds(run: Callable[[], None], repetitions: int, device: torch.device) -> float:
    """The median of so many runs."""
    for _ in range(3):
        run()
    found: list[float] = []
    for _ in range(repetitions):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1000)
        else:
            started = time.perf_counter()
            run()
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def measured(numel: int, repetitions: int, device: torch.device) -> list[dict[str, float | str]]:
    found: list[dict[str, float | str]] = []
    for row in rows(numel, device):
        took = seconds(row.run, repetitions, device)
        source = torch.zeros(row.nbytes // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copied = seconds(lambda s=source, t=target: t.copy_(s), repetitions, device)
        rate = row.nbytes / took
        found.append({"use": row.name, "gb_s": rate / 1e9, "share_of_copy": copied / took, "ms": 1000 * took})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="of bfloat16 values")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    block = RANKS * 256
    found = measured(int(args.gib * GIB / 2) // block * block, args.repetitions, device)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    table = Table(title=f"{args.gib:g} GiB of bfloat16 on {device}")
    for column in ("use", "ms", "GB/s", "share of a copy's rate"):
        table.add_column(column, justify="left" if column == "use" else "right")
    for row in found:
        table.add_row(
            str(row["use"]), f"{row['ms']:.3f}", f"{row['gb_s']:.0f}", f"{100 * float(row['share_of_copy']):.0f} %"
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

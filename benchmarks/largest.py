"""The largest model of Llama's shape that the plan says one GPU and its host train, found before any GPU is there.

    python -m benchmarks largest [--cluster 1xH100-80GB] [--host-gib 128] [--width 13b] [--batch 4] [--json FILE]

For each way of updating state in host memory: the most layers of `--width` for which some share of the optimizer's
state on the host lets both memories suffice, activations checkpointed, and the least such share. `--keep-host` GiB are
left to the process, its libraries and the system, and `--keep-device` of the card to fragmentation. The size `14b` of
the other benchmarks is what this prints for one H100.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.llama import SIZES, Llama, Shape
from benchmarks.planner_cases import RECIPE
from zeroshard.plan.offload import Offload as HostState
from zeroshard.plan.policy import HostUpdate
from zeroshard.planner.machine.hardware import GIB, Cluster, parse_cluster
from zeroshard.planner.predict.rows import Row, Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.sources import ModelSource
from zeroshard.planner.trace.workload import Workload

SHARES = 40
"""Shares are looked for in steps of one over this."""
LEAST_NBYTES = 8
"""Bytes a parameter that no way of training stays below: where the search begins."""
WAYS = {
    "streamed": (Offload.CPU, HostUpdate.STREAMED),
    "processor": (Offload.CPU, HostUpdate.PROCESSOR),
    "param": (Offload.CPU_PARAM, HostUpdate.STREAMED),
    "param-processor": (Offload.CPU_PARAM, HostUpdate.PROCESSOR),
}
"""By the name that --offload of benchmarks.train has for it."""


@dataclass(frozen=True)
class Limits:
    """Bytes that may be taken of the device and of the host."""

    device: int
    host: int


@dataclass(frozen=True)
class Found:
    """The most layers of one way, with what they take."""

    offload: str
    layers: int
    numel: int
    share: float
    device_gib: float
    allocated_gib: float
    host_gib: float
    step_s: float
    tokens_s: float


def row(
    shape: Shape, way: str, share: float, cluster: Cluster, batch: tuple[int, int], works: dict[int, Workload]
) -> Row:
    """The planner's row of a model with checkpointing at stage 3."""
    offload, update = WAYS[way]

    def inputs(_: nn.Module, samples: int, length: int) -> dict[str, torch.Tensor]:
        return {name: torch.empty(samples, length, dtype=torch.int64) for name in ("ids", "targets")}

    if shape.layers not in works:
        source = ModelSource(f"{shape.layers} layers", lambda: Llama(shape, checkpointing=True), inputs)
        works[shape.layers] = Workload(source, *batch)
    recipe = replace(RECIPE, offload=HostState(update=update))
    return make_row(works[shape.layers], recipe, Setting(3, offload, Checkpointing.OFF, share), cluster)


def largest(width: Shape, way: str, cluster: Cluster, batch: tuple[int, int], limits: Limits) -> Found | None:
    """The most layers, and the least share of the state on the host for which they fit; None where not one does."""
    works: dict[int, Workload] = {}

    def fitting(layers: int) -> tuple[float, Row] | None:
        shape = replace(width, layers=layers)
        shares = [1.0] if WAYS[way][0] is Offload.CPU_PARAM else [step / SHARES for step in range(1, SHARES + 1)]
        low, high = 0, len(shares) - 1  # the device needs less and the host more with a growing share
        while low < high:
            middle = (low + high) // 2
            if row(shape, way, shares[middle], cluster, batch, works).total <= limits.device:
                high = middle
            else:
                low = middle + 1
        made = row(shape, way, shares[low], cluster, batch, works)
        return (shares[low], made) if made.total <= limits.device and made.host <= limits.host else None

    a_layer = replace(width, layers=1).numel - replace(width, layers=0).numel
    most, too_many = 0, (limits.device + limits.host) // (LEAST_NBYTES * a_layer) + 1
    best: tuple[float, Row] | None = None
    while too_many - most > 1:
        middle = (most + too_many) // 2
        found = fitting(middle)
        if found is None:
            too_many = middle
        else:
            most, best = middle, found
    if best is None:
        return None
    share, made = best
    return Found(
        way,
        most,
        replace(width, layers=most).numel,
        share,
        round(made.total / GIB, 1),
        round(made.memory.peak.total / GIB, 1),
        round(made.host / GIB, 1),
        round(made.time.seconds, 2),
        round(made.tokens_per_second),
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="1xH100-80GB", help="as for zeroshard plan")
    parser.add_argument("--host-gib", type=float, default=128.0, help="memory of the host")
    parser.add_argument("--keep-host", type=float, default=8.0, help="GiB of it that are left alone")
    parser.add_argument("--keep-device", type=float, default=4.0, help="GiB of the card that are left alone")
    parser.add_argument("--width", choices=SIZES, default="13b", help="whose shape, in all but the layers")
    parser.add_argument("--offload", choices=WAYS, action="append", help="only these ways; may be repeated")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args(argv)


def limits(args: argparse.Namespace, cluster: Cluster) -> Limits:
    """What the options leave of both memories."""
    return Limits(int(cluster.gpu.memory - args.keep_device * GIB), int((args.host_gib - args.keep_host) * GIB))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    cluster = parse_cluster(args.cluster)
    allowed = limits(args, cluster)
    print(f"{cluster.label}, {args.host_gib:g} GiB of host memory, {args.batch} x {args.length} tokens, stage 3")
    print("| offload | layers | parameters | share on the host | card GiB | allocated | host GiB | s/step | tokens/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    rows: list[Found] = []
    for way in args.offload or WAYS:
        found = largest(SIZES[args.width], way, cluster, (args.batch, args.length), allowed)
        if found is None:
            print(f"| {way} | not one layer fits | | | | | | | |")
            continue
        rows.append(found)
        cells = (
            f"{found.layers} | {found.numel / 1e9:.2f}e9 | {found.share:.3f} | {found.device_gib} | "
            f"{found.allocated_gib} | {found.host_gib} | {found.step_s} | {found.tokens_s}"
        )
        print(f"| {way} | {cells} |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(found) for found in rows], indent=1) + "\n", encoding="utf-8")
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())

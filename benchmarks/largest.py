"""The largest model of Llama's shape that the plan says one GPU and its host train, found before any GPU is there.

    python -m benchmarks largest [--cluster 1xH100-80GB] [--host-gib 128] [--width 13b] [--batch 4] [--json FILE]
    python -m benchmarks largest --cluster 1xH200 --disk-gib 60 --disk-gbps 2          with a disk, the way `nvme`
    python -m benchmarks largest --cluster 1xH200 --disk-gib 60 --bits 8               and Adam's moments in 8 bits

For each way of updating offloaded state: the most layers of `--width` for which some share of the optimizer's state off
the device lets all memories suffice, activations checkpointed, and the least such share; with `nvme` host memory takes
of it what fits there, and the disk the rest. `--keep-host` GiB are left to the process, its libraries and the system,
and `--keep-device` of the card to fragmentation. The sizes `14b`, `20b` and `30b` of the other benchmarks come from
this, for one H100 and for one H200 with a disk of 60 GiB, the last with moments in 8 bits.
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
from zeroshard.nvme.places import Spill
from zeroshard.optim.adam.low_bit import BLOCK_SIZES
from zeroshard.plan.offload import Offload as HostState
from zeroshard.plan.placement import Blocks
from zeroshard.plan.policy import HostUpdate
from zeroshard.planner.machine.hardware import GIB, Cluster, parse_cluster
from zeroshard.planner.predict.rows import Row, Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.sources import ModelSource
from zeroshard.planner.trace.workload import Workload

SHARES = 40
"""Shares are looked for in steps of one over this."""
DISK_SHARES = 200
"""The same with a disk, on which each percent of the state costs seconds of a step."""
FOLDER = Spill((".",))
"""Plans with a disk name a folder; nothing is opened there."""
LEAST_NBYTES = 6
"""Bytes a parameter that no way of training stays below: where the search begins."""
WAYS = {
    "streamed": (Offload.CPU, HostUpdate.STREAMED),
    "processor": (Offload.CPU, HostUpdate.PROCESSOR),
    "param": (Offload.CPU_PARAM, HostUpdate.STREAMED),
    "param-processor": (Offload.CPU_PARAM, HostUpdate.PROCESSOR),
    "nvme": (Offload.NVME, HostUpdate.PROCESSOR),
}
"""By the name that --offload of benchmarks.train has for it."""


@dataclass(frozen=True)
class Limits:
    """Bytes that may be taken of the device, of the host and of its disk."""

    device: int
    host: int
    disk: int = 0


@dataclass(frozen=True)
class Step:
    """Sequences and tokens of each in a step, and the bits of Adam's moments."""

    samples: int
    length: int
    bits: int = 32


@dataclass(frozen=True)
class Found:
    """The most layers of one way, with what they take.

    Attributes:
        share: of the optimizer's state, off the device.
        on_host: the share of it that rests in host memory although the rest is on disk.
    """

    offload: str
    layers: int
    numel: int
    share: float
    on_host: float
    device_gib: float
    allocated_gib: float
    host_gib: float
    disk_gib: float
    step_s: float
    tokens_s: float


@dataclass(frozen=True)
class Fit:
    """Shares with which a model fits, as in Found, and the planner's row."""

    share: float
    on_host: float
    row: Row


def row(
    shape: Shape,
    way: str,
    share: float,
    cluster: Cluster,
    step: Step,
    works: dict[int, Workload],
    on_host: float = 0.0,
) -> Row:
    """The planner's row of a model with checkpointing at stage 3."""
    offload, update = WAYS[way]

    def inputs(_: nn.Module, samples: int, length: int) -> dict[str, torch.Tensor]:
        return {name: torch.empty(samples, length, dtype=torch.int64) for name in ("ids", "targets")}

    if shape.layers not in works:
        source = ModelSource(f"{shape.layers} layers", lambda: Llama(shape, checkpointing=True), inputs)
        works[shape.layers] = Workload(source, step.samples, step.length)
    state = HostState(update=update if step.bits == 32 else HostUpdate.STREAMED)
    if offload is Offload.NVME:
        state = replace(state, tier=offload.states, spill=FOLDER, host_ratio=on_host)
    recipe = replace(RECIPE, offload=state, blocks=None if step.bits == 32 else Blocks(8, BLOCK_SIZES[8]))
    return make_row(works[shape.layers], recipe, Setting(3, offload, Checkpointing.OFF, share), cluster)


def fit(shape: Shape, way: str, cluster: Cluster, step: Step, limits: Limits, works: dict[int, Workload]) -> Fit | None:
    """The least share off the device for which a model fits, and of a disk as little as possible; None if none does."""
    on_disk, only = WAYS[way][0] is Offload.NVME, WAYS[way][0] is Offload.CPU_PARAM
    steps = DISK_SHARES if on_disk else SHARES
    shares = [1.0] if only else [step / steps for step in range(1, steps + 1)]

    def made(share: float, on_host: float = 0.0) -> Row:
        return row(shape, way, share, cluster, step, works, on_host)

    low, high = 0, len(shares) - 1  # the device needs less and the host more with a growing share
    while low < high:
        middle = (low + high) // 2
        if made(shares[middle]).total <= limits.device:
            high = middle
        else:
            low = middle + 1
    share, on_host = shares[low], 0.0
    if on_disk:
        least, most = 0, low + 2  # `least` of host memory fits, and `most` is more than there is to divide
        while most - least > 1:
            middle = (least + most) // 2
            if made(share, middle / steps).host <= limits.host:
                least = middle
            else:
                most = middle
        on_host = least / steps
    found = made(share, on_host)
    fits = found.total <= limits.device and found.host <= limits.host and found.disk <= limits.disk
    return Fit(share, on_host, found) if fits else None


def largest(width: Shape, way: str, cluster: Cluster, step: Step, limits: Limits) -> Found | None:
    """The most layers, and the least share of the state on the host for which they fit; None where not one does."""
    works: dict[int, Workload] = {}

    def fitting(layers: int) -> Fit | None:
        return fit(replace(width, layers=layers), way, cluster, step, limits, works)

    a_layer = replace(width, layers=1).numel - replace(width, layers=0).numel
    most, too_many = 0, (limits.device + limits.host + limits.disk) // (LEAST_NBYTES * a_layer) + 1
    best: Fit | None = None
    while too_many - most > 1:
        middle = (most + too_many) // 2
        found = fitting(middle)
        if found is None:
            too_many = middle
        else:
            most, best = middle, found
    if best is None:
        return None
    made = best.row
    return Found(
        way,
        most,
        replace(width, layers=most).numel,
        best.share,
        best.on_host,
        round(made.total / GIB, 1),
        round(made.memory.peak.total / GIB, 1),
        round(made.host / GIB, 1),
        round(made.disk / GIB, 1),
        round(made.time.seconds, 2),
        round(made.tokens_per_second),
    )


HEAD = "| offload | layers | parameters | on host, disk | card GiB | allocated | host GiB | disk | s/step | tokens/s |"


def _ways(args: argparse.Namespace) -> list[str]:
    """Those that there can be: with a disk, or without; moments in 8 bits pass the device."""
    ways = [way for way in WAYS if args.disk_gib or WAYS[way][0] is not Offload.NVME]
    return ways if args.bits == 32 else [way for way in ways if "processor" not in way]


def _places(found: Found) -> str:
    """Shares of the state in host memory and on disk."""
    on_disk = WAYS[found.offload][0] is Offload.NVME
    host = found.on_host if on_disk else found.share
    return f"{host:.3f}, {found.share - host:.3f}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="1xH100-80GB", help="as for zeroshard plan")
    parser.add_argument("--host-gib", type=float, default=128.0, help="memory of the host")
    parser.add_argument("--disk-gib", type=float, default=0.0, help="room on its disk; 0 is none")
    parser.add_argument("--disk-gbps", type=float, default=2.0, help="GB/s that this reads and writes")
    parser.add_argument("--bits", type=int, choices=(32, 8), default=32, help="of Adam's moments")
    parser.add_argument("--keep-host", type=float, default=8.0, help="GiB of it that are left alone")
    parser.add_argument("--keep-device", type=float, default=4.0, help="GiB of the card that are left alone")
    parser.add_argument("--width", choices=SIZES, default="13b", help="whose shape, in all but the layers")
    parser.add_argument("--offload", choices=WAYS, action="append", help="only these ways; may be repeated")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args(argv)


def limits(args: argparse.Namespace, cluster: Cluster) -> Limits:
    """What the options leave of all memories."""
    device, host = cluster.gpu.memory - args.keep_device * GIB, (args.host_gib - args.keep_host) * GIB
    return Limits(int(device), int(host), int(args.disk_gib * GIB))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    cluster = parse_cluster(args.cluster, disk_gbs=args.disk_gbps)
    allowed = limits(args, cluster)
    disk = f", {args.disk_gib:g} GiB of disk at {args.disk_gbps:g} GB/s" if args.disk_gib else ""
    print(f"{cluster.label}, {args.host_gib:g} GiB of host memory{disk}, {args.batch} x {args.length} tokens, stage 3")
    print(HEAD)
    print("| --- |" + " ---: |" * (HEAD.count("|") - 2))
    rows: list[Found] = []
    for way in args.offload or _ways(args):
        step = Step(args.batch, args.length, args.bits)
        found = largest(SIZES[args.width], way, cluster, step, allowed)
        if found is None:
            print(f"| {way} | not one layer fits |" + " |" * (HEAD.count("|") - 3))
            continue
        rows.append(found)
        cells = (
            f"{found.layers} | {found.numel / 1e9:.2f}e9 | {_places(found)} | {found.device_gib} | "
            f"{found.allocated_gib} | {found.host_gib} | {found.disk_gib} | {found.step_s} | {found.tokens_s}"
        )
        print(f"| {way} | {cells} |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(found) for found in rows], indent=1) + "\n", encoding="utf-8")
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""A profiler's trace reduced to a picture: one step, a lane per CUDA stream, colours by what ran.

    python -m benchmarks.timeline TRACE.json[.gz] PICTURE.svg [--title TEXT]

    compute          |=gemm=|attention|==gemm==|...
    device to host         |==|  |==|  |==|
    host to device   |========================|

The step is the one that benchmarks.account accounts for. Work that lies closer together than a picture can show is
drawn as one. Rejected: the trace itself in a viewer, which shows everything and so nothing at a glance.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.account import GPU, Interval, kernel_class, read_trace, step_window

COLORS = {
    "matrix products": "#4c72b0",
    "attention": "#8172b3",
    "other kernels": "#b3b3b3",
    "optimizer": "#c44e52",
    "NCCL": "#dd8452",
    "copies on the device": "#93b7a5",
    "copies between GPUs": "#ccb974",
    "host to device": "#55a868",
    "device to host": "#64b5cd",
}
KINDS = {
    "gemm": "matrix products",
    "attention": "attention",
    "nccl": "NCCL",
    "optimizer": "optimizer",
    "copies": "copies on the device",
    "elementwise": "other kernels",
}
COPIES = (("HtoD", "host to device"), ("DtoH", "device to host"), ("PtoP", "copies between GPUs"))
PIXELS = 2500
"""Gaps shorter than the window over this are not drawn."""


@dataclass(frozen=True)
class Lane:
    """What ran on one stream: intervals in milliseconds from the begin of the step, by kind."""

    name: str
    busy: Mapping[str, Sequence[Interval]]


def lanes(events: Sequence[Mapping[str, Any]]) -> tuple[float, list[Lane]]:
    """The length of the step in milliseconds, and its streams in the order of their numbers, compute first.

    Raises:
        ValueError: the trace has no two steps with work on a GPU.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    window = step_window(spans)
    if window is None:
        raise ValueError("the trace has no work on a GPU")
    begin, end = window
    found: dict[int, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for event in spans:
        start, stop = event["ts"], event["ts"] + event.get("dur", 0)
        if event.get("cat") in GPU and start < end and stop > begin:
            cut = ((max(start, begin) - begin) / 1000, (min(stop, end) - begin) / 1000)
            found[event["args"]["stream"]][kind_of(event)].append(cut)
    length = (end - begin) / 1000
    made = [
        Lane(_name(kinds), {kind: merged(cuts, length / PIXELS) for kind, cuts in kinds.items()})
        for _, kinds in sorted(found.items())
    ]
    return length, sorted(made, key=lambda lane: lane.name != "compute")


def kind_of(event: Mapping[str, Any]) -> str:
    """What a kernel or copy counts as in the picture."""
    for part, kind in COPIES:
        if part in event["name"]:
            return kind
    return KINDS[kernel_class(event["name"], event["cat"])]


def _name(kinds: Mapping[str, Sequence[Interval]]) -> str:
    if "matrix products" in kinds:
        return "compute"
    return max(kinds, key=lambda kind: sum(end - start for start, end in kinds[kind]))


def merged(cuts: Sequence[Interval], gap: float) -> list[Interval]:
    """Intervals in order, those nearer than `gap` as one."""
    result: list[Interval] = []
    for start, end in sorted(cuts):
        if result and start - result[-1][1] <= gap:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def draw(length: float, drawn: Sequence[Lane], path: Path, title: str) -> None:
    """Write the picture; its format follows from the file's name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 0.55 * len(drawn) + 1.6))
    for row, lane in enumerate(drawn):
        for kind, cuts in lane.busy.items():
            bars = [(start, max(end - start, length / PIXELS)) for start, end in cuts]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=COLORS[kind])
    kinds = [kind for kind in COLORS if any(kind in lane.busy for lane in drawn)]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[kind]) for kind in kinds]
    axes.legend(handles, kinds, loc="upper center", bbox_to_anchor=(0.45, -0.22), ncols=5, frameon=False, fontsize=8)
    axes.set_yticks(range(len(drawn)), [lane.name for lane in drawn])
    axes.invert_yaxis()
    axes.set_xlim(0, length)
    axes.set_xlabel("milliseconds")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    try:
        length, drawn = lanes(read_trace(args.trace))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    draw(length, drawn, args.picture, args.title)
    return 0


if __name__ == "__main__":
    sys.exit(main())

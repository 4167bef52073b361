"""Where the time of one training step went, read from a chrome trace of torch.profiler.

    python -m benchmarks.account TRACE.json[.gz]

The trace holds several steps that followed each other without a pause, each inside an annotation "step"; the last but
one is accounted for. Its window on the GPU runs from the first compute kernel that it launched to the first one of the
step after it, so what the host still did for it, and what the GPU did late, are both inside:

    host   |--- step 1 ---|--- step 2 ---|--- step 3 ---|
    GPU        |--- step 1 ---|=== window ===|--- step 3 ---|

Times on the GPU are lengths of unions of intervals: two kernels at once count once. Kernels go by their name, except
that what was launched inside the annotation "optimizer" (and torch's own around `Optimizer.step`) is the optimizer's;
NCCL is NCCL everywhere. Exposed NCCL is when nothing but NCCL ran. A look-up by the profiler's own tables was rejected:
they add up durations, which tells neither overlap nor idle time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEP = "step"
CLASSES = ("gemm", "attention", "nccl", "copies", "elementwise", "optimizer")
NAMES: Sequence[tuple[str, tuple[str, ...]]] = (
    ("nccl", ("nccl",)),
    ("optimizer", ("adam",)),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("gemm", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "matmul")),
    ("copies", ("copy", "copies", "memcpy", "memset", "catarray", "chunk_cat", "fillfunctor")),
)
"""The first row with a part that a kernel's name contains decides; what no row names is elementwise."""

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")
SYNCHRONIZING = frozenset(
    {
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cudaFree",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventSynchronize",
    }
)
Interval = tuple[float, float]


@dataclass(frozen=True)
class Account:
    """One step of rank 0, in milliseconds.

    Attributes:
        window: length of the step on the GPU.
        busy: when at least one kernel or copy ran.
        idle: window minus busy.
        by_class: when at least one kernel of the class ran; classes overlap, so these may add up to more than busy.
        exposed_nccl: when NCCL ran and nothing else.
        kernels: kernels and copies in the window.
        host: from the begin to the end of the step on the host, under the profiler.
        waiting: of that, time inside of synchronizing calls.
        synchronizing: how often each synchronizing CUDA call was made.
    """

    window: float
    busy: float
    idle: float
    by_class: Mapping[str, float]
    exposed_nccl: float
    kernels: int
    host: float
    waiting: float
    synchronizing: Mapping[str, int]

    def lines(self) -> list[str]:
        """The account as text, one fact a line."""

        def share(value: float) -> str:
            return f"{value:9.3f} ms {100 * value / self.window:5.1f}%"

        text = [f"{'GPU window':14}{share(self.window)}", f"{'busy':14}{share(self.busy)}"]
        text += [f"  {name:12}{share(self.by_class[name])}" for name in CLASSES]
        text += [f"{'exposed nccl':14}{share(self.exposed_nccl)}", f"{'idle':14}{share(self.idle)}"]
        text.append(f"{'host':14}{share(self.host)}   {self.waiting:.3f} ms of it in synchronizing calls")
        calls = ", ".join(f"{name} {count}" for name, count in self.synchronizing.items()) or "none"
        return [*text, f"{'kernels':14}{self.kernels:9d}", f"synchronizing calls: {calls}"]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Work:
    """A kernel or copy: when it ran, when it was launched (microseconds), and its class."""

    start: float
    end: float
    launched: float
    kind: str


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a chrome trace, plain or gzipped."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    return json.loads(text)["traceEvents"]


def account(events: Sequence[Mapping[str, Any]]) -> Account | None:
    """The account of the last step but one; None where the trace has no GPU work, as on a machine without one.

    Raises:
        ValueError: fewer than two steps, so that no window can be closed.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    works, steps = _works(spans), _steps(spans)
    found = _window(works, steps)
    if found is None:
        return None
    step, (begin, end) = steps[-2], found
    window = [(max(w.start, begin), min(w.end, end), w.kind) for w in works if w.start < end and w.end > begin]
    by_class = {name: _length(_union((a, b) for a, b, kind in window if kind == name)) for name in CLASSES}
    busy = _length(_union((a, b) for a, b, _ in window))
    without_nccl = _length(_union((a, b) for a, b, kind in window if kind != "nccl"))
    calls = [event for event in spans if event.get("cat") in RUNTIME and event["name"] in SYNCHRONIZING]
    waits = [event for event in calls if step[0] <= event["ts"] < step[1]]
    return Account(
        window=(end - begin) / 1000,
        busy=busy / 1000,
        idle=(end - begin - busy) / 1000,
        by_class={name: value / 1000 for name, value in by_class.items()},
        exposed_nccl=(busy - without_nccl) / 1000,
        kernels=len(window),
        host=(step[1] - step[0]) / 1000,
        waiting=_length(_union(_interval(event) for event in waits)) / 1000,
        synchronizing=dict(Counter(event["name"] for event in waits)),
    )


def step_window(spans: Sequence[Mapping[str, Any]]) -> Interval | None:
    """Begin and end on the GPU, in microseconds, of the step that `account` is about; None without work on a GPU."""
    return _window(_works(spans), _steps(spans))


def _steps(spans: Sequence[Mapping[str, Any]]) -> list[Interval]:
    steps = sorted(
        _interval(event) for event in spans if event["name"] == STEP and event.get("cat") == "user_annotation"
    )
    if len(steps) < 2:
        raise ValueError(f"the trace has {len(steps)} annotations {STEP!r}; an account needs two or more")
    return steps


def _window(works: Sequence[_Work], steps: Sequence[Interval]) -> Interval | None:
    # The last step has no successor to end its window, and the first ones start on an empty queue and a cold profiler.
    begin, end = _first_compute(works, steps[-2]), _first_compute(works, steps[-1])
    return None if begin is None or end is None else (begin, end)


def kernel_class(name: str, category: str = "kernel") -> str:
    """The class of a kernel by its name; copies and fills by the driver are copies."""
    if category != "kernel":
        return "copies"
    lower = name.lower()
    for kind, parts in NAMES:
        if any(part in lower for part in parts):
            return kind
    return "elementwise"


def _works(spans: Sequence[Mapping[str, Any]]) -> list[_Work]:
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in spans
        if event.get("cat") in RUNTIME and "correlation" in event.get("args", {})
    }
    optimizer = _union(_interval(event) for event in spans if _is_optimizer(event))
    works: list[_Work] = []
    for event in spans:
        category = event.get("cat", "")
        if category not in GPU:
            continue
        start, end = _interval(event)
        launched = launches.get(event.get("args", {}).get("correlation"), start)
        kind = kernel_class(event["name"], category)
        if kind != "nccl" and _inside(launched, optimizer):
            kind = "optimizer"
        works.append(_Work(start, end, launched, kind))
    return works


def _is_optimizer(event: Mapping[str, Any]) -> bool:
    name = event["name"]
    return event.get("cat") == "user_annotation" and (name == "optimizer" or name.startswith("Optimizer.step"))


def _first_compute(works: Sequence[_Work], step: Interval) -> float | None:
    """When the first kernel that a step launched for its computation began."""
    starts = [w.start for w in works if step[0] <= w.launched < step[1] and w.kind not in ("nccl", "copies")]
    return min(starts, default=None)


def _interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(union: Sequence[Interval]) -> float:
    return sum(end - start for start, end in union)


def _inside(moment: float, union: Sequence[Interval]) -> bool:
    index = bisect_right(union, (moment, float("inf"))) - 1
    return index >= 0 and moment < union[index][1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    found = account(read_trace(parser.parse_args().trace))
    if found is None:
        print("the trace has no work on a GPU")
        return 1
    print("\n".join(found.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures the planner's cases on this machine beside its predictions: `python -m benchmarks planner --measure`.

    start the ranks ----- they join, import, wait for the cases ------+--> rows, as they come
    predict every case, leave out what does not fit, write the cases -+

Rows that come are kept when a later one fails; the ranks are then started anew for the rest. Without a GPU times and
memory say nothing of the planner: it is a way to try the command (`--size tiny --length 64 --nproc 2`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.planned import machine
from benchmarks.planner_cases import CASES, Case, predict
from benchmarks.ranks import run_ranks
from zeroshard.planner.machine.hardware import GIB, Cluster
from zeroshard.planner.predict.rows import Row

MEMORY_LIMIT, TIME_LIMIT = 0.03, 0.10
KEPT_FREE = 4 * GIB
"""Host memory that is left to everything else."""


@dataclass(frozen=True)
class Options:
    """What the command line asked for; `size` None takes all sizes, `nproc` 0 all GPUs."""

    size: str | None
    length: int
    steps: int
    nproc: int
    budget: float
    calibration: Path | None
    output: Path | None


def measure(options: Options) -> int:
    """Measure, print the table, write the JSON; 1 where a row on a GPU is outside of the limits or missing."""
    gpus = torch.cuda.device_count()
    nproc = options.nproc or max(1, gpus)
    cluster = machine(nproc, options.calibration)
    cases = tuple(_cases(options.size))
    report = Report(cluster, options.length, torch.cuda.get_device_name(0) if gpus else None)
    began = time.monotonic()
    waiting: list[Case] | None = None
    while waiting is None or waiting:
        left = options.budget - (time.monotonic() - began)
        if waiting is not None and left < 20:
            report.failed.update(dict.fromkeys(waiting, "left out: no time left in the budget"))
            break
        waiting = _round(cases if waiting is None else waiting, report, nproc, left, options)
    print("\n".join(report.table()))
    content = {"seconds": round(time.monotonic() - began, 1), "nproc": nproc, **report.as_json()}
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"\n{content['seconds']} s in all", file=sys.stderr)
    return 0 if report.good else 1


def _round(cases: Sequence[Case], report: Report, nproc: int, budget: float, options: Options) -> list[Case]:
    """Start ranks and measure as many cases as come; what is still to be measured after that, without the one that
    failed."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, ThreadPoolExecutor(1) as beside:
        path = Path(folder) / "cases.json"
        arguments = ["--cases", str(path), "--length", str(options.length), "--steps", str(options.steps)]
        running = beside.submit(run_ranks, "benchmarks.planner_ranks", arguments, nproc=nproc, timeout=budget)
        chosen = report.predict(cases)
        draft = Path(folder) / "draft.json"
        draft.write_text(json.dumps([asdict(case) for case in chosen]), encoding="utf-8")
        os.replace(draft, path)
        done = running.result()
    for line in done.output.splitlines():
        if line.startswith('{"case"'):
            row = json.loads(line)
            report.measured[Case(**row.pop("case"))] = row
    waiting = [case for case in chosen if case not in report.measured]
    if waiting:
        print(f"{waiting[0].label(options.length)}: {done.error}\n{done.log}", file=sys.stderr, flush=True)
        report.failed[waiting.pop(0)] = done.error or "no figure"
    return waiting


class Report:
    """Predictions and what was measured, case by case. `card` is what was measured on, None for no GPU."""

    def __init__(self, cluster: Cluster, length: int, card: str | None) -> None:
        self.cluster, self._length, self._card, self._on_gpu = cluster, length, card, card is not None
        self._rows: dict[Case, Row] = {}
        self.measured: dict[Case, dict[str, Any]] = {}
        self.failed: dict[Case, str] = {}

    def predict(self, cases: Sequence[Case]) -> list[Case]:
        """The planner's row of each case; gives those that fit this machine."""
        for case in cases:
            if case not in self._rows:
                self._rows[case] = predict(case, self._length, self.cluster)
        too_large = {case: self._too_large(self._rows[case]) for case in cases}
        self.failed.update({case: why for case, why in too_large.items() if why})
        return [case for case in cases if not too_large[case]]

    def _too_large(self, row: Row) -> str:
        if self._on_gpu and row.total > self.cluster.gpu.memory:
            return f"does not fit: {row.total / GIB:.1f} GiB"
        if row.host + KEPT_FREE > self.cluster.host_memory:
            return f"does not fit: {row.host / GIB:.1f} GiB of host memory"
        return ""

    @property
    def good(self) -> bool:
        """Whether all that was measured is within the limits. Without a GPU nothing can be outside."""
        unexpected = [why for why in self.failed.values() if not why.startswith("does not fit")]
        outside = [case for case, row in self.measured.items() if not self._within(case, row)]
        return not unexpected and bool(self.measured) and not (self._on_gpu and outside)

    def _within(self, case: Case, row: Mapping[str, Any]) -> bool:
        memory, seconds = self._errors(case, row)
        return (memory is None or abs(memory) <= MEMORY_LIMIT) and abs(seconds) <= TIME_LIMIT

    def _errors(self, case: Case, row: Mapping[str, Any]) -> tuple[float | None, float]:
        made = self._rows[case]
        measured = row["allocated_gib"]
        memory = None if measured is None else made.memory.peak.total / GIB / measured - 1
        return memory, made.time.seconds / row["step_s"] - 1

    def table(self) -> Iterator[str]:
        """Markdown, a line per case."""
        yield "| configuration | s/step: predicted | measured | | GiB: predicted | measured | | left behind | limits |"
        yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
        for case, made in self._rows.items():
            row, label = self.measured.get(case), case.label(self._length)
            seconds, gib = made.time.seconds, made.memory.peak.total / GIB
            if row is None:
                why = self.failed.get(case, "not measured")
                yield f"| {label} | {seconds:.4f} | {why} | | {gib:.2f} | | | | |"
                continue
            memory, late = self._errors(case, row)
            pair = " | " if memory is None else f"{row['allocated_gib']:.2f} | {memory:+.1%}"
            left = "" if row["left_gib"] is None else f"{row['left_gib']:.2f}"
            within = "within" if self._within(case, row) else "OUTSIDE"
            times = f"{seconds:.4f} | {row['step_s']:.4f} | {late:+.1%}"
            yield f"| {label} | {times} | {gib:.2f} | {pair} | {left} | {within if self._on_gpu else 'no GPU'} |"

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines: bytes, seconds, and errors as shares of what was measured."""
        rows = [self._entry(case, made) for case, made in self._rows.items()]
        return {"card": self._card or "cpu", "torch": torch.__version__, "cluster": asdict(self.cluster), "rows": rows}

    def _entry(self, case: Case, made: Row) -> dict[str, Any]:
        peak = made.memory.peak
        predicted = {
            "step_s": made.time.seconds,
            "allocated_gib": peak.total / GIB,
            "reserved_gib": (peak.total + made.slack) / GIB,
            "moment": peak.label,
            "gib": {name: round(nbytes / GIB, 4) for name, nbytes in peak.nbytes.items()},
            "compute": made.time.compute,
            "busy": made.time.busy,
            "exposed": made.time.exposed,
        }
        row = self.measured.get(case)
        entry = {"label": case.label(self._length), **asdict(case), "predicted": predicted, "measured": row}
        if row is None:
            return {**entry, "why": self.failed.get(case, "not measured")}
        memory, seconds = self._errors(case, row)
        return {**entry, "memory_error": memory, "time_error": seconds, "within": self._within(case, row)}


def _cases(size: str | None) -> Iterator[Case]:
    """All cases; of one size only where it is asked for, and those of 1b for a size that has none."""
    chosen = size if any(case.size == size for case in CASES) else "1b"
    for case in CASES:
        if size is None or case.size == chosen:
            yield replace(case, size=size or case.size)

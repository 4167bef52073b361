"""Writes a simulated step as a Chrome trace, for chrome://tracing or Perfetto, with one row per stream."""

from __future__ import annotations

import json
from pathlib import Path

from zeroshard.planner.predict.timeline import STREAMS, StepTime

MICROSECONDS = 1e6


def write_trace(path: Path, time: StepTime, title: str) -> None:
    """Write the spans of `time` as complete events, in microseconds."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
        for number, stream in enumerate(STREAMS)
    ]
    spans = [
        {
            "ph": "X",
            "name": span.label,
            "cat": span.stream,
            "pid": 0,
            "tid": STREAMS.index(span.stream),
            "ts": round(span.start * MICROSECONDS, 3),
            "dur": round((span.end - span.start) * MICROSECONDS, 3),
        }
        for span in time.spans
    ]
    process = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"{title} (simulated)"}}
    path.write_text(json.dumps({"traceEvents": [process, *names, *spans]}), encoding="utf-8")

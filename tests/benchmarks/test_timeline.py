"""The picture of a step: lanes by stream, kinds by what ran, nothing outside of the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.timeline import draw, lanes, merged
from tests.benchmarks.test_account import Trace


def _trace() -> Trace:
    trace = Trace()
    for index in range(3):
        at = 1000.0 * index
        trace.span("user_annotation", "step", at, at + 1000)
        for name, category, stream, start, end in (
            ("nvjet_tst_128x256", "kernel", 7, 0, 400),
            ("nvjet_tst_128x256", "kernel", 7, 600, 900),
            ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 26, 100, 500),
            ("adam_step", "kernel", 30, 500, 600),
        ):
            trace.kernel(name, at + 10, at + start + 50, at + end + 50, category)
            trace.events[-1]["args"]["stream"] = stream
    return trace


def test_each_stream_is_a_lane_with_the_step_s_intervals_by_kind() -> None:
    length, found = lanes(_trace().events)
    assert length == 1.0
    assert [lane.name for lane in found] == ["compute", "host to device", "optimizer"]
    assert found[0].busy["matrix products"] == [(0.0, 0.4), (0.6, 0.9)]
    assert found[1].busy["host to device"] == [(0.1, 0.5)]


def test_what_lies_closer_than_the_picture_shows_is_one() -> None:
    assert merged([(3.0, 4.0), (0.0, 1.0), (1.01, 2.0)], 0.1) == [(0.0, 2.0), (3.0, 4.0)]


def test_a_trace_without_a_gpu_is_refused() -> None:
    trace = Trace()
    for index in range(3):
        trace.span("user_annotation", "step", index * 10.0, index * 10.0 + 5)
    with pytest.raises(ValueError, match="no work on a GPU"):
        lanes(trace.events)


def test_the_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(*lanes(_trace().events), tmp_path / "step.png", "a step")
    assert (tmp_path / "step.png").stat().st_size > 1000

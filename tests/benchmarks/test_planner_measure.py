"""The command that judges the planner: what counts as within, and that it measures on two ranks in one group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import planner_measure
from benchmarks.planner_cases import Case
from benchmarks.planner_measure import Options, Report, measure
from tests.support.cases import only_with_all_cases
from zeroshard.planner.machine.hardware import parse_cluster

CASE = Case("tiny", 3, 1)


def _report(*, memory: float, seconds: float) -> Report:
    """A report whose one measurement is off by these factors."""
    report = Report(parse_cluster("2xH100-80GB"), 64, "a card")
    assert report.predict([CASE]) == [CASE]
    predicted = report.as_json()["rows"][0]["predicted"]
    row = {"allocated_gib": predicted["allocated_gib"] * memory, "step_s": predicted["step_s"] * seconds}
    report.measured[CASE] = {**row, "left_gib": 0.0}
    return report


@pytest.mark.parametrize(("memory", "seconds", "good"), [(1.02, 0.93, True), (1.04, 1.0, False), (1.0, 1.2, False)])
def test_memory_within_three_and_time_within_ten_percent_is_good(memory: float, seconds: float, good: bool) -> None:
    report = _report(memory=memory, seconds=seconds)
    assert report.good is good
    assert ("OUTSIDE" in "\n".join(report.table())) is not good


def test_what_does_not_fit_is_left_out_and_said() -> None:
    report = Report(parse_cluster("1xRTX3090"), 2048, "a card")
    large = Case("1b", 3, 4)
    assert report.predict([large]) == []
    assert "does not fit" in "\n".join(report.table())


@only_with_all_cases
def test_two_ranks_measure_several_cases_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_measure, "CASES", (Case("1b", 3, 1), Case("1b", 2, 1, offload="processor")))
    output = tmp_path / "rows.json"
    assert measure(Options("tiny", 16, 1, 2, 300.0, None, output)) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["size"] for row in rows] == ["tiny", "tiny"]
    assert all(row["measured"]["step_s"] > 0 for row in rows)

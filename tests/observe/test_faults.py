"""Faults in small real runs, each of which is called by its name; `python -m benchmarks faults` makes many of them.

Faults are large beside the runs, for other tests run at the same time on the same cores; so it is asked that the fault
is among what was found, and not that nothing else is. A run that others disturb more than its fault is measured again.
"""

from __future__ import annotations

import re

import pytest

from benchmarks.fault_kinds import FAULTS, KINDS, Fault, draw
from benchmarks.faults import Said, holds, judge, measured
from zeroshard.observe.runs.findings import Cause

SLEEP = 0.03
ATTEMPTS = 3


def small(kind: str, rank: int, steps: int = 14, **numbers: float) -> Fault:
    """Two ranks with a model that takes next to no time."""
    return Fault(kind, 2, rank, 3, 64, 2, 2, 16, steps, 2, 0, numbers)


TOLD = (
    small("tokens", 1, times=40.0),
    small("loader", 1, seconds=SLEEP, every=1),
    small("script", 0, seconds=SLEEP),
    small("blocked", 1, seconds=SLEEP),
    small("garbage", 0, objects=2e5, every=1),
    small("disk", 1, steps=8, seconds=0.004),
    small("saving", -1, every=2),
    small("nan", 1, count=3),
    small("overflow", -1, times=1e15),
    small("spike", -1, times=100.0),
    small("resume", -1, steps=24, rate=100.0),
    small("leak", 0, steps=32, mib=8.0),
)


@pytest.mark.parametrize("fault", TOLD, ids=lambda fault: fault.kind)
def test_explain_names_the_fault_and_its_rank(fault: Fault) -> None:
    wanted = str(KINDS[fault.kind].cause), None if fault.rank < 0 else fault.rank
    for _ in range(ATTEMPTS):
        said = measured(fault)
        assert not said.error
        if wanted in said.found:
            return
    pytest.fail(f"{wanted} was never found, but {said.texts}")


@pytest.mark.parametrize("fault", [small("lost", 1), small("damaged", -1)], ids=lambda f: f.kind)
def test_an_error_names_the_fault_and_its_rank(fault: Fault) -> None:
    said = measured(fault)
    pattern = KINDS[fault.kind].error
    assert pattern is not None
    assert re.search(pattern.replace("{rank}", str(fault.rank)), said.error), said.error


def test_every_kind_is_drawn_from_its_seed_alone() -> None:
    for kind in KINDS:
        faults = [draw(kind, seed) for seed in range(40)]
        assert faults == [draw(kind, seed) for seed in range(40)]
        assert all(-1 <= fault.rank < fault.ranks for fault in faults)
    assert len(FAULTS) >= 20


def test_an_answer_is_judged_by_its_first_finding_and_by_what_it_calls_hardware() -> None:
    fault = small("tokens", 1)
    tokens, slower = str(Cause.TOKENS), str(Cause.SLOWER)
    assert judge(fault, Said(((tokens, 1),), "")) == "right"
    assert judge(fault, Said(((tokens, 0),), "")) == "wrong"
    assert judge(fault, Said(((str(Cause.DATA), 1), (tokens, 1)), "")) == "wrong"
    assert judge(fault, Said(((tokens, 1), (slower, 0)), "")) == "hardware"
    assert judge(fault, Said((), "")) == "not named"
    assert judge(small("lost", 1), Said((), "rank 1 died (process 7 on node)")) == "right"
    assert judge(small("lost", 1), Said((), "rank 0 died (process 7 on node)")) == "wrong"
    assert judge(small("healthy", -1), Said((), "")) == "right"
    assert judge(small("healthy", -1), Said(((tokens, 1),), "")) == "wrong"
    rows = [{"fault": {"kind": "lost"}, "outcome": "right"}] * 19
    assert holds([*rows, {"fault": {"kind": "lost"}, "outcome": "wrong"}])
    assert not holds([*rows, {"fault": {"kind": "lost"}, "outcome": "hardware"}])
    assert not holds([*rows, {"fault": {"kind": "healthy"}, "outcome": "wrong"}])

"""Logs of ranks with something wrong in them: each fault is called by its name, with its rank, and nothing else is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from zeroshard.observe.host import BETWEEN, DATA, DISK, GARBAGE, UPDATE
from zeroshard.observe.record import StepRecord
from zeroshard.observe.runs.components import OWN, components_of
from zeroshard.observe.runs.explain import explain, findings
from zeroshard.observe.runs.findings import Cause
from zeroshard.observe.runs.log import Load, Run
from zeroshard.observe.runs.report import report

Component = tuple[str, str]
USUAL: Mapping[Component, float] = {
    ("forward", OWN): 0.010,
    ("forward", "all-gather"): 0.002,
    ("backward", OWN): 0.020,
    ("backward", "reduce-scatter"): 0.003,
    ("step", OWN): 0.003,
    (BETWEEN, OWN): 0.001,
}
LATE, MORE = 1, 0.015
"""The rank that is late in these logs, and by how much in a step of 39 ms."""


def record(number: int, spent: Mapping[Component, float], *, busy: float, **given: Any) -> StepRecord:
    """A step whose components are these."""
    parts = {part: sum(s for (where, _), s in spent.items() if where == part) for part, _ in spent}
    waits: dict[str, dict[str, float]] = {}
    for (part, kind), seconds in spent.items():
        if kind != OWN:
            waits.setdefault(part, {})[kind] = seconds
    plain: dict[str, Any] = {
        "tokens": 256,
        "loss": 2.0,
        "norm": 1.0,
        "applied": True,
        "scale": None,
        "host": {"queued": 0.0, "faults": 0.0, "resident": 5e8},
    }
    return StepRecord(
        step=number,
        samples=8 * number,
        batch=8,
        skipped=0,
        rates=[0.1],
        seconds={part: seconds for part, seconds in parts.items() if part != BETWEEN},
        whole=sum(parts.values()),
        ended=0.0,
        waits=waits,
        busy={"forward": busy},
        **{**plain, **given},
    )


def log(steps: list[StepRecord], **given: Any) -> Run:
    return Run(2, {"all-gather over dp_shard": 10**7}, {}, tuple(steps), (), {"all-gather over dp_shard": 10}, **given)


def late_rank(where: Component, *, busy: bool = False, every: int = 1, **figures: Any) -> dict[int, Run]:
    """Rank 1 needs more in one component, in each or some steps; rank 0 waits for it in the backward."""
    runs: dict[int, list[StepRecord]] = {0: [], 1: []}
    for number in range(1, 61):
        late = number % every == 0
        more = (MORE if every == 1 else 10 * MORE) * late
        waiting = {**USUAL, ("backward", "reduce-scatter"): 0.003 + more}
        working = {**USUAL, where: USUAL.get(where, 0.0) + more}
        runs[0].append(record(number, waiting, busy=0.034))
        tokens = figures.get("tokens", 256)
        host = {"queued": 0.0, "faults": 0.0, "resident": 5e8, **figures.get("host", {})}
        runs[LATE].append(record(number, working, busy=0.034 + more * busy, tokens=tokens, host=host))
    return {rank: log(steps) for rank, steps in runs.items()}


CAUSES = {
    Cause.TOKENS: late_rank(("forward", OWN), busy=True, tokens=512),
    Cause.GARBAGE: late_rank(("forward", GARBAGE)),
    Cause.DATA: late_rank((BETWEEN, DATA)),
    Cause.SCRIPT: late_rank((BETWEEN, OWN)),
    Cause.BLOCKED: late_rank(("forward", OWN)),
    Cause.PROCESSOR: late_rank(("backward", OWN), host={"queued": 0.9 * MORE}),
    Cause.MEMORY: late_rank(("forward", OWN), host={"faults": 50.0}),
    Cause.DISK: late_rank(("forward", UPDATE), host={"disk": 0.9 * MORE}),
    Cause.SLOWER: late_rank(("forward", OWN), busy=True),
}


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_a_late_rank_is_named_with_its_cause(cause: Cause) -> None:
    (found,) = findings(CAUSES[cause])
    assert (found.cause, found.rank) == (cause, LATE)
    assert found.text.startswith(
        "rank 1 keeps the others waiting: it needs 15.00 ms more than they do in a step of 54.00"
    )
    assert f"The cause is {cause}" in found.text
    assert f"finding 1: {found.text}" in list(explain(CAUSES[cause][0], CAUSES[cause]))


@pytest.mark.parametrize("where", [(BETWEEN, OWN), (BETWEEN, DATA), ("forward", GARBAGE), ("forward", DISK)])
def test_what_takes_all_ranks_a_few_times_is_compared_with_the_mean_of_a_step(where: Component) -> None:
    steps = [record(n, {**USUAL, where: 0.6 if n % 6 == 0 else 0.0}, busy=0.034) for n in range(1, 61)]
    (found,) = findings({rank: log(steps) for rank in (0, 1)})
    told = re.search(r"([\d.]+) ms of a step of ([\d.]+) ms", found.text)
    assert told is not None
    spent, whole = map(float, told.groups())
    assert spent == pytest.approx(600 * 10 / 57, abs=1.1)
    assert whole == pytest.approx(spent + 38, abs=1.1)


def test_a_rank_that_is_late_at_times_is_named_with_the_steps() -> None:
    (found,) = findings(late_rank((BETWEEN, DATA), every=12))
    assert (found.cause, found.rank) == (Cause.DATA, LATE)
    assert "150.00 ms more than they do in 5 steps (12, 24, 36, 48, 60)" in found.text


def test_a_wait_for_others_is_not_held_against_the_rank_that_waits() -> None:
    runs = CAUSES[Cause.SCRIPT]
    assert sum(components_of(runs[0].steps[9]).values()) == pytest.approx(runs[0].steps[9].whole)
    lines = list(explain(runs[0], runs))
    assert "a rank waits 12.50 ms of a step in collectives (mean), 7.50 ms of it for the slowest rank" in lines


def on_gpu(late: Component, waits: Component) -> dict[int, Run]:
    """As on a GPU: rank 1 needs more in one component, and rank 0 waits for it within another, unseen by its host."""
    own = {one: seconds for one, seconds in USUAL.items() if one[1] == OWN}
    runs: dict[int, Run] = {}
    for rank, where in ((0, waits), (1, late)):
        spent = {**own, where: own.get(where, 0.0) + MORE}
        runs[rank] = log([record(number, spent, busy=0.002) for number in range(1, 61)], device="cuda")
    return runs


def test_on_a_gpu_ranks_are_compared_by_what_their_hosts_wait_for_and_not_by_their_passes() -> None:
    (found,) = findings(on_gpu((BETWEEN, DATA), ("backward", OWN)))
    assert (found.cause, found.rank) == (Cause.DATA, 1)
    assert findings(on_gpu(("forward", OWN), ("backward", OWN))) == []


def timed_on_gpu(late: Component, waits: Component, **figures: Any) -> dict[int, Run]:
    """The same where one step of eight has the device's waits; in the others they are within their part."""
    runs: dict[int, Run] = {}
    for rank, where in ((0, waits), (1, late)):
        spent = {**USUAL, where: USUAL.get(where, 0.0) + MORE}
        within: dict[Component, float] = {}
        for (part, kind), seconds in spent.items():
            unseen = OWN if kind in ("all-gather", "reduce-scatter") else kind
            within[part, unseen] = within.get((part, unseen), 0.0) + seconds
        steps: list[StepRecord] = []
        for number in range(1, 201):
            step = record(number, spent if number % 8 == 0 else within, busy=0.002, **(figures if rank else {}))
            steps.append(replace(step, waits={}, device_waits=step.waits) if number % 8 == 0 else step)
        runs[rank] = log(steps, device="cuda")
    return runs


@pytest.mark.parametrize(("cause", "tokens"), [(Cause.TOKENS, 512), (Cause.SLOWER, 256)])
def test_on_a_gpu_whose_waits_are_timed_a_rank_that_computes_longer_is_named(cause: Cause, tokens: int) -> None:
    runs = timed_on_gpu(("forward", OWN), ("backward", "reduce-scatter"), tokens=tokens)
    (found,) = findings(runs)
    assert (found.cause, found.rank) == (cause, LATE)
    lines = list(explain(runs[0], runs))
    assert "a rank waits 12.50 ms of a step in collectives (mean), 7.50 ms of it for the slowest rank" in lines
    assert any("all-gather over dp_shard 2.00 ms" in line for line in lines)


def test_the_report_shows_findings_first_and_a_curve_of_each_rank() -> None:
    runs = CAUSES[Cause.SCRIPT]
    page = report(runs[0], "run", runs)
    assert page.index("<ol><li>rank 1 keeps the others waiting") < page.index("<pre>")
    assert page.count("keeps the others waiting") == 1
    assert ">rank 0</text>" in page
    assert ">rank 1</text>" in page
    assert "rank 1" not in report(runs[0], "run")
    assert "<ol>" not in report(runs[0], "run")


def test_a_run_in_which_nothing_is_wrong_has_no_findings() -> None:
    steps = [record(number, USUAL, busy=0.034) for number in range(1, 61)]
    assert findings({0: log(steps), 1: log(steps)}) == []


def of_all(extra: Mapping[Component, float], **given: Any) -> dict[int, Run]:
    """Both ranks need more in the same components."""
    host = given.pop("host", {"queued": 0.0})
    steps = [record(number, {**USUAL, **extra}, busy=0.034, host=host) for number in range(1, 61)]
    return {rank: replace(log(steps), **given) for rank in (0, 1)}


@pytest.mark.parametrize(
    ("cause", "runs"),
    [
        (Cause.DATA, of_all({(BETWEEN, DATA): 0.02})),
        (Cause.GARBAGE, of_all({("backward", GARBAGE): 0.004})),
        (Cause.SCRIPT, of_all({(BETWEEN, OWN): 0.03})),
        (Cause.DISK, of_all({("step", DISK): 0.02})),
        (Cause.DISK, of_all({("forward", UPDATE): 0.03}, host={"disk": 0.025})),
        (Cause.LINK, of_all({("backward", "all-gather"): 0.2})),
        (Cause.SAVING, of_all({}, saves=(0.5, 0.5, 0.5))),
    ],
    ids=lambda value: value.name if isinstance(value, Cause) else "",
)
def test_what_slows_down_all_ranks_names_none_of_them(cause: Cause, runs: dict[int, Run]) -> None:
    (found,) = findings(runs)
    assert (found.cause, found.rank) == (cause, None)


def test_a_few_steps_and_single_late_ones_say_nothing_of_the_link() -> None:
    few = of_all({("backward", "all-gather"): 0.2})
    assert findings({rank: replace(run, steps=run.steps[:12]) for rank, run in few.items()}) == []
    late = record(9, {**USUAL, ("backward", "all-gather"): 3.0}, busy=0.034)
    steps = [late if number % 10 == 9 else record(number, USUAL, busy=0.034) for number in range(1, 61)]
    assert findings({rank: log([replace(s, step=n) for n, s in enumerate(steps, 1)]) for rank in (0, 1)}) == []


def test_small_messages_say_nothing_of_the_link() -> None:
    assert findings(of_all({("backward", "all-gather"): 0.2}, sent={"all-gather over dp_shard": 10**4})) == []


def test_ranks_are_not_compared_where_their_logs_are_not_here() -> None:
    runs = {0: CAUSES[Cause.SCRIPT][0]}
    assert findings(runs) == []
    assert "ranks are not compared: of 2 the logs of 1 are here (run_log.ranks)" in list(explain(runs[0], runs))


def odd(changed: Mapping[int, Mapping[str, Any]], **given: Any) -> Run:
    """A run with other values in some steps."""
    return log([record(number, USUAL, busy=0.034, **changed.get(number, {})) for number in range(1, 61)], **given)


def skipped(scale: float | None, kind: str, loss: float = 2.0) -> dict[str, Any]:
    return {"applied": False, "norm": math.inf, "scale": scale, "nonfinite": f"0.weight ({kind})", "loss": loss}


def test_nan_is_named_with_the_rank_whose_loss_was_none() -> None:
    runs = {0: odd({30: skipped(256.0, "NaN")}), 1: odd({30: skipped(256.0, "NaN", math.nan)})}
    (found,) = findings(runs)
    assert (found.cause, found.rank) == (Cause.NAN, 1)
    assert "the first is 30: the loss of rank 1 was inf or NaN itself" in found.text
    assert "first in 0.weight (NaN)" in found.text


def test_overflow_without_end_is_named_and_the_search_for_a_scale_is_not() -> None:
    searching = odd({number: skipped(2.0 ** (17 - number), "inf") for number in range(1, 5)})
    assert findings({0: searching, 1: searching}) == []
    endless = odd({number: skipped(max(2.0 ** (17 - number), 1.0), "NaN") for number in range(1, 61)})
    (found,) = findings({0: endless, 1: endless})
    assert found.cause is Cause.OVERFLOW
    assert "60 steps in a row overflowed, while the loss scale fell from 65536 to 1" in found.text


def test_a_spike_is_named_and_norms_that_fall_as_the_model_learns_are_not() -> None:
    falling = {number: {"norm": 0.8**number} for number in range(1, 61)}
    assert findings({0: odd(falling), 1: odd(falling)}) == []
    (found,) = findings({0: odd({**falling, 40: {"norm": 0.01}})})
    assert found.cause is Cause.SPIKE
    assert "the first in step 40" in found.text


def loaded(left_out: tuple[str, ...], loss: float, rate: float = 0.1) -> Run:
    before = [record(number, USUAL, busy=0.034) for number in range(20, 30)]
    after = [replace(record(number, USUAL, busy=0.034, loss=loss), rates=[rate]) for number in range(30, 40)]
    return odd({}, loads=(Load(left_out, tuple(before), after),))


def test_a_loss_that_rises_at_a_load_is_named_with_what_was_left_out() -> None:
    assert findings({0: loaded((), 2.01)}) == []
    (found,) = findings({0: loaded(("optimizer",), 3.0, rate=1.0)})
    assert found.cause is Cause.RESUME
    assert (
        "from step 30 on, where it was 2 before: the optimizer was not loaded and the learning rate is 1" in found.text
    )
    (found,) = findings({0: loaded((), 3.0)})
    assert "everything was loaded" in found.text


def test_a_load_amid_a_run_without_the_optimizer_is_named_though_the_loss_does_not_rise() -> None:
    (found,) = findings({0: loaded(("optimizer",), 2.01)})
    assert found.cause is Cause.RESUME
    assert "went on in step 30 from a checkpoint, and its optimizer state was not loaded" in found.text
    assert findings({0: loaded(("scheduler",), 2.01)}) == []


def test_a_load_amid_a_run_after_which_the_rate_is_ten_times_another_is_named() -> None:
    for rate in (3.0, 0.01):
        (found,) = findings({0: loaded((), 2.01, rate=rate)})
        assert found.cause is Cause.RESUME
        assert f"from a checkpoint, and the learning rate is {rate:g} where it was 0.1" in found.text
    assert findings({0: loaded((), 2.01, rate=0.5)}) == []


def test_memory_that_grows_is_named_with_its_rank() -> None:
    growing = {number: {"host": {"resident": 5e8 + 4e6 * number}} for number in range(1, 61)}
    (found,) = findings({0: odd({}), 1: odd(growing)})
    assert (found.cause, found.rank) == (Cause.LEAK, 1)
    settling = {number: {"host": {"resident": 5e8 + 2e8 * (1 - 0.9**number)}} for number in range(1, 61)}
    assert findings({0: odd({}), 1: odd(settling)}) == []
    assert "by 3.8" in found.text

"""`zeroshard explain`: where the time of a run went, what was slow, and what was odd, in sentences with figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from zeroshard.observe.record import StepRecord
from zeroshard.observe.runs.log import Run
from zeroshard.observe.times import PARTS

BETWEEN = "between"
"""What lies between the parts: waiting for data, and what the script does."""
_CAUSES = {
    "forward": "gathers that come late, or the model itself",
    "backward": "gathers and reduces that come late, or the model itself",
    "step": "the optimizer; with offload the processor and PCIe",
    BETWEEN: "the data loader, or the script itself",
}
_SLOW, _SPIKE, _DRIFT, _FEW = 1.5, 10.0, 0.05, 10


def parts_of(step: StepRecord) -> dict[str, float]:
    """Seconds of a step by part, with what lies between; they sum up to the step."""
    assert step.whole is not None
    parts = {part: step.seconds.get(part, 0.0) for part in PARTS}
    return {**parts, BETWEEN: step.whole - sum(parts.values())}


def explain(run: Run) -> Iterator[str]:
    """The lines."""
    timed = [step for step in run.steps[1:] or run.steps if step.whole is not None]
    yield f"{len(run.steps)} steps on {run.ranks} ranks, {run.steps[-1].samples} samples"
    if timed:
        yield from _where(timed)
        yield from _slow(timed)
        yield from _drift(timed)
    yield from _odd(run.steps)
    if run.saves:
        yield f"{len(run.saves)} checkpoints were saved, each kept training for {_ms(sum(run.saves) / len(run.saves))}"
    for collective, nbytes in sorted(run.sent.items(), key=lambda item: -item[1]):
        yield f"the plan sends {nbytes} bytes in a step: {collective}"


def _where(steps: Sequence[StepRecord]) -> Iterator[str]:
    whole = sum(step.whole or 0.0 for step in steps)
    yield f"a step takes {_ms(whole / len(steps))} (mean without the first one):"
    for part in (*PARTS, BETWEEN):
        seconds = sum(parts_of(step)[part] for step in steps)
        yield f"  {part:<9} {_ms(seconds / len(steps)):>12}  {seconds / whole:6.1%}"


def _slow(steps: Sequence[StepRecord]) -> Iterator[str]:
    """Steps far above the median, and the part that grew the most in each."""
    usual = {part: median(parts_of(step)[part] for step in steps) for part in (*PARTS, BETWEEN)}
    whole = median(step.whole or 0.0 for step in steps)
    slow = [step for step in steps if (step.whole or 0.0) > _SLOW * whole]
    if not slow:
        return
    grown = Counter(max(usual, key=lambda part: parts_of(step)[part] - usual[part]) for step in slow)
    yield f"{len(slow)} steps took more than {_SLOW} times the usual {_ms(whole)}:"
    for part, count in grown.most_common():
        numbers = ", ".join(
            str(step.step) for step in slow if max(usual, key=lambda p: parts_of(step)[p] - usual[p]) == part
        )
        yield f"  {count} by {part} ({_CAUSES[part]}): steps {numbers if count <= _FEW else numbers[:60] + ' ...'}"


def _drift(steps: Sequence[StepRecord]) -> Iterator[str]:
    """Whether the end of the run is slower than its beginning, and by which part."""
    tenth = len(steps) // 10
    if tenth < 1:
        return
    early, late = steps[:tenth], steps[-tenth:]
    change = {
        part: median(parts_of(step)[part] for step in late) - median(parts_of(step)[part] for step in early)
        for part in (*PARTS, BETWEEN)
    }
    before = median(step.whole or 0.0 for step in early)
    grown = sum(change.values()) / before if before else 0.0
    if grown > _DRIFT:
        part = max(change, key=lambda name: change[name])
        yield f"the last tenth is {grown:.0%} slower than the first, most of it {part} ({_CAUSES[part]})"


def _odd(steps: Sequence[StepRecord]) -> Iterator[str]:
    skipped = [step.step for step in steps if not step.applied]
    if skipped:
        yield f"{len(skipped)} steps were not applied, the first is {skipped[0]}: inf or NaN in the gradients"
    bad = [step.step for step in steps if step.loss is not None and not math.isfinite(step.loss)]
    if bad:
        yield f"{len(bad)} losses were inf or NaN, the first in step {bad[0]}"
    norms = [(step.step, step.norm) for step in steps if step.norm is not None and math.isfinite(step.norm)]
    usual = median(norm for _, norm in norms) if norms else 0.0
    spikes = [step for step, norm in norms if norm > _SPIKE * usual]
    if spikes:
        above = f"above {_SPIKE:g} times the usual {usual:g}"
        yield f"{len(spikes)} gradient norms were {above}, the first in step {spikes[0]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"

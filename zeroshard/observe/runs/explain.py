"""`zeroshard explain`: where the time of a run went, what was slow, and what was odd, in sentences with figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from zeroshard.observe.host import BETWEEN, DATA, GARBAGE, LINK, UPDATE
from zeroshard.observe.record import StepRecord
from zeroshard.observe.runs.compare import Comparison
from zeroshard.observe.runs.components import OWN, collective_seconds, components_of, parts_of, with_waits
from zeroshard.observe.runs.findings import Finding, ms
from zeroshard.observe.runs.log import Run
from zeroshard.observe.runs.odd import SPIKE, norm_spikes, oddities
from zeroshard.observe.runs.slow import mean_imbalance, slowness
from zeroshard.observe.times import PARTS

FINDING = "finding"
"""How lines begin that say what is wrong."""
_CAUSES = {
    "forward": "gathers that come late, or the model itself",
    "backward": "gathers and reduces that come late, or the model itself",
    "step": "the optimizer; with offload the processor and PCIe",
    BETWEEN: "the data loader, or the script itself",
}
_NAMES = {
    OWN: "itself",
    DATA: "the loader",
    GARBAGE: "collecting garbage",
    UPDATE: "updates on the processor",
    LINK: "copies from and to host memory",
}
_SLOW, _DRIFT, _FEW = 1.5, 0.05, 10
_LEAST_SHOWN = 0.005
"""Share of a step below which a component is not listed."""


def explain(run: Run, ranks: Mapping[int, Run] | None = None) -> Iterator[str]:
    """The lines.

    Args:
        run: the log of rank 0.
        ranks: the logs of all ranks that there are, by rank.
    """
    ranks = ranks or {0: run}
    timed = [step for step in run.steps[1:] or run.steps if step.whole]
    yield f"{len(run.steps)} steps on {run.ranks} ranks, {run.steps[-1].samples} samples"
    if timed:
        yield from _where(timed, run)
        yield from _waiting(ranks)
        yield from _slow(timed)
        yield from _drift(timed)
    yield from _odd(run.steps)
    if run.saves:
        yield f"{len(run.saves)} checkpoints were saved, each kept training for {ms(sum(run.saves) / len(run.saves))}"
    for collective, nbytes in sorted(run.sent.items(), key=lambda item: -item[1]):
        yield f"the plan sends {nbytes} bytes in a step: {collective}"
    for number, finding in enumerate(findings(ranks), 1):
        yield f"{FINDING} {number}: {finding.text}"


def findings(ranks: Mapping[int, Run]) -> list[Finding]:
    """All that is wrong: odd numbers first, then what takes time, the costliest first."""
    return [*oddities(ranks), *slowness(ranks)]


def _waiting(ranks: Mapping[int, Run]) -> Iterator[str]:
    """How much of the waits for collectives is for the slowest rank, where the logs of all ranks are there."""
    run = ranks[min(ranks)]
    if run.ranks < 2 or not all(with_waits(one.steps, one.device) for one in ranks.values()):
        return
    if len(ranks) < run.ranks:
        yield f"ranks are not compared: of {run.ranks} the logs of {len(ranks)} are here (run_log.ranks)"
        return
    compared = Comparison(ranks)
    if compared.numbers and any(map(collective_seconds, compared.sides[min(ranks)].components)):
        late = mean_imbalance(compared)
        waited = ms(fmean(compared.exposed()) + late)
        yield f"a rank waits {waited} of a step in collectives (mean), {ms(late)} of it for the slowest rank"


def _where(steps: Sequence[StepRecord], run: Run) -> Iterator[str]:
    whole = sum(step.whole or 0.0 for step in steps)
    seen = with_waits(steps, run.device) or steps
    seen_whole = sum(step.whole or 0.0 for step in seen)
    yield f"a step takes {ms(whole / len(steps))} (mean without the first one):"
    for part in (*PARTS, BETWEEN):
        seconds = sum(parts_of(step)[part] for step in steps)
        yield f"  {part:<9} {ms(seconds / len(steps)):>12}  {seconds / whole:6.1%}"
        spent = Counter[str]()
        for step in seen:
            spent.update({kind: s for (where, kind), s in components_of(step).items() if where == part})
        listed = [(kind, s) for kind, s in spent.most_common() if s > _LEAST_SHOWN * seen_whole]
        if any(kind != OWN for kind, _ in listed):
            yield "    " + ", ".join(f"{_in_words(kind, run)} {ms(s / len(seen))}" for kind, s in listed)


def _in_words(kind: str, run: Run) -> str:
    """A component; collectives with their axes, where the kind is used over one choice of them."""
    over = [name for name in run.sent if name.startswith(f"{kind} over ")]
    return over[0] if len(over) == 1 else _NAMES.get(kind, kind)


def _slow(steps: Sequence[StepRecord]) -> Iterator[str]:
    """Steps far above the median, and the part that grew the most in each."""
    usual = {part: median(parts_of(step)[part] for step in steps) for part in (*PARTS, BETWEEN)}
    whole = median(step.whole or 0.0 for step in steps)
    slow = [step for step in steps if (step.whole or 0.0) > _SLOW * whole]
    if not slow:
        return
    grown = Counter(max(usual, key=lambda part: parts_of(step)[part] - usual[part]) for step in slow)
    yield f"{len(slow)} steps took more than {_SLOW} times the usual {ms(whole)}:"
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
    spikes, usual = norm_spikes(steps)
    if spikes:
        above = f"above {SPIKE:g} times the usual {usual:g}"
        yield f"{len(spikes)} gradient norms were {above}, the first in step {spikes[0]}"

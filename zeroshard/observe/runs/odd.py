"""What is odd about the numbers of a run: NaN, overflow, spikes, a loss that jumps at a load, memory that grows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median, pstdev

from zeroshard.observe.record import StepRecord
from zeroshard.observe.runs.findings import Cause, Finding
from zeroshard.observe.runs.log import Load, Run

SPIKE = 10.0
"""How many times the usual norm is called a spike."""
_LOOP = 8
"""Skipped steps in a row after which a falling loss scale is no search for the right one any more."""
_AROUND = 16
"""Norms before and after a step with which it is compared; they fall by themselves as a model learns."""
_JUMP, _JUMP_SHARE, _FEWEST, _JUMP_STEPS = 4.0, 0.1, 4, 6
_LEAK_SHARE, _LEAK_BYTES, _TENTHS, _RISING, _LATELY = 0.1, 32 << 20, 10, 8, 0.2
MIB = 2**20


def oddities(runs: Mapping[int, Run]) -> Iterator[Finding]:
    """What is odd; the first of `runs` tells what all ranks have alike."""
    run = runs[min(runs)]
    bad = _bad_losses(runs)
    skipped = [step for step in run.steps if not step.applied]
    numberless = [step for step in skipped if step.step in bad or step.scale is None]
    if numberless:
        yield _nan(numberless, bad)
    yield from _overflow([step for step in skipped if step not in numberless], run.steps)
    jumps = [finding for load in run.loads for finding in _jump(load)]
    yield from jumps
    if not jumps:  # a loss that jumps takes the norm along
        yield from _spikes(run.steps)
    for rank, one in runs.items():
        yield from _leak(rank, one.steps)


def _bad_losses(runs: Mapping[int, Run]) -> dict[int, int]:
    """The first rank whose loss was inf or NaN, by step."""
    found: dict[int, int] = {}
    for rank, run in runs.items():
        for step in run.steps:
            if step.loss is not None and not math.isfinite(step.loss):
                found.setdefault(step.step, rank)
    return found


def _nan(steps: Sequence[StepRecord], bad: Mapping[int, int]) -> Finding:
    """Steps that no loss scale could have saved: a loss that is no number, or gradients without a scale."""
    first = steps[0]
    rank = bad.get(first.step)
    where = "the loss was finite" if rank is None else f"the loss of rank {rank} was inf or NaN itself"
    return Finding(
        Cause.NAN,
        f"{len(steps)} steps were not applied for inf or NaN, the first is {first.step}: {where}, and so were the "
        f"gradients, first in {first.nonfinite}. This does not come from the loss scale: look at the input of that "
        "step, at divisions and logarithms, and at the learning rate",
        rank,
    )


def _overflow(steps: Sequence[StepRecord], every: Sequence[StepRecord]) -> Iterator[Finding]:
    """Many steps in a row, or the last ones, with finite losses and gradients that are not."""
    longest = _longest_row(steps)
    at_end = bool(steps) and steps[-1].step == every[-1].step and longest > _LOOP // 2
    if longest >= _LOOP or at_end:
        scales = [step.scale for step in steps if step.scale is not None]
        yield Finding(
            Cause.OVERFLOW,
            f"{longest} steps in a row overflowed, while the loss scale fell from {scales[0]:g} to {scales[-1]:g}, "
            f"first in {steps[-1].nonfinite}: nothing is learned. Train in bf16, or look for activations beyond 65504",
        )


def _longest_row(steps: Sequence[StepRecord]) -> int:
    longest = row = 0
    for place, step in enumerate(steps):
        row = row + 1 if place and steps[place - 1].step == step.step - 1 else 1
        longest = max(longest, row)
    return longest


def norm_spikes(steps: Sequence[StepRecord]) -> tuple[list[int], float]:
    """The steps whose norm is far above those before and after it, and the median of all."""
    norms = [(step.step, step.norm) for step in steps if step.norm is not None and math.isfinite(step.norm)]
    found: list[int] = []
    for place, (step, norm) in enumerate(norms):
        before = [other for _, other in norms[max(place - _AROUND, 0) : place]]
        after = [other for _, other in norms[place + 1 : place + 1 + _AROUND]]
        if len(before) >= _FEWEST and norm > SPIKE * max(median(before), median(after or before)):
            found.append(step)
    return found, median(norm for _, norm in norms) if norms else 0.0


def _spikes(steps: Sequence[StepRecord]) -> Iterator[Finding]:
    spikes, usual = norm_spikes(steps)
    if spikes:
        yield Finding(
            Cause.SPIKE,
            f"{len(spikes)} gradient norms were above {SPIKE:g} times the usual {usual:g}, the first in step "
            f"{spikes[0]}: look at the data of that step; gradient_clipping limits what it does",
        )


def _jump(load: Load) -> Iterator[Finding]:
    before, after = _losses(load.before)[-_JUMP_STEPS:], _losses(load.after)[:_JUMP_STEPS]
    if min(len(before), len(after)) < _FEWEST:
        return
    rise = fmean(after) - fmean(before)
    if rise < max(_JUMP * pstdev(before), _JUMP_SHARE * abs(fmean(before))):
        yield from _went_on(load, fmean(before), fmean(after))
        return
    reasons = [f"the {part} was not loaded" for part in load.left_out]
    reasons += _other_rate(load, 2)
    why = " and ".join(reasons) or (
        "everything was loaded; look at the data's order, at what the script sets anew after the load, and whether the "
        "model is the same"
    )
    yield Finding(
        Cause.RESUME,
        f"the loss is {fmean(after):.4g} in the steps after the load of a checkpoint, from step {load.after[0].step} "
        f"on, where it was {fmean(before):.4g} before: {why}",
    )


def _went_on(load: Load, before: float, after: float) -> Iterator[Finding]:
    """A load amid a run that changed what trains it, though the loss did not rise."""
    if load.after[0].step != load.before[-1].step + 1:
        return
    reasons = _other_rate(load, 10)
    if "optimizer" in load.left_out:
        reasons.append("its optimizer state was not loaded (load_optimizer_states=False): its moments begin anew")
    if reasons:
        yield Finding(
            Cause.RESUME,
            f"the run went on in step {load.after[0].step} from a checkpoint, and {' and '.join(reasons)}. The loss is "
            f"{after:.4g} in the steps after it, where it was {before:.4g} before",
        )


def _other_rate(load: Load, times: float) -> list[str]:
    """In words that the learning rate is another one after a load, so many times as high or as low."""
    (before, *_), (after, *_) = (step.rates or (0.0,) for step in (load.before[-1], load.after[0]))
    if not before or not after or 1 / times < after / before < times:
        return []
    return [f"the learning rate is {after:g} where it was {before:g}"]


def _losses(steps: Sequence[StepRecord]) -> list[float]:
    return [step.loss for step in steps if step.loss is not None and math.isfinite(step.loss)]


def _leak(rank: int, steps: Sequence[StepRecord]) -> Iterator[Finding]:
    sizes = [step.host["resident"] for step in steps if "resident" in step.host][len(steps) // 5 :]
    if len(sizes) < 2 * _TENTHS:
        return
    tenths = [median(sizes[len(sizes) * i // _TENTHS : len(sizes) * (i + 1) // _TENTHS]) for i in range(_TENTHS)]
    grown = tenths[-1] - tenths[0]
    rising = sum(b > a for a, b in itertools.pairwise(tenths))
    lately = tenths[-1] - tenths[-1 - _TENTHS // 3]  # an allocator's pools grow at the beginning, a leak all the time
    if rising >= _RISING and grown > max(_LEAK_BYTES, _LEAK_SHARE * tenths[0]) and lately > _LATELY * grown:
        yield Finding(
            Cause.LEAK,
            f"the memory of rank {rank}'s process grows, by {grown / len(sizes) / MIB * 10 / 9:.2f} MiB a step, from "
            f"{tenths[0] / MIB:.0f} to {tenths[-1] / MIB:.0f} MiB: look for tensors or losses that the script keeps, "
            "and for caches",
            rank,
        )

"""Explains why a config does not fit: the items of its peak, and the three cheapest changes that make it fit.

For a config that fits, it names the three cheapest changes that free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zeroshard.errors import PlanError
from zeroshard.plan.report import human_bytes
from zeroshard.planner.predict.rows import Row, Setting
from zeroshard.planner.predict.tiers import TABLE, Offload, allowed
from zeroshard.planner.trace.checkpointing import Checkpointing

CHANGES = 3
WORTH_FREEING = 0.02
"""Share of the card's memory that a change to a config that fits must free to be named."""
RATIOS = (0.25, 0.5, 0.75)
"""Shares of the optimizer's state that are offloaded to host memory before all of it is."""
CHECKPOINTING = "activation checkpointing"
Option = tuple[str, Setting, int]
"""A change in words, the setting that it leads to, and the sequences per micro-batch."""
MakeRow = Callable[[Setting, int], Row]
"""Makes the row of a setting with a number of sequences per micro-batch, at the same global batch."""


@dataclass(frozen=True)
class Change:
    """A change that makes a config fit; `slower` is how much longer a step takes, as a share of the config's."""

    what: str
    row: Row
    slower: float


@dataclass(frozen=True)
class Explanation:
    """A config's row, the items of its peak, the largest first, and changes, the cheapest first."""

    row: Row
    largest: tuple[tuple[str, int], ...]
    changes: tuple[Change, ...]


def explain(setting: Setting, samples: int, make: MakeRow) -> Explanation:
    """Explain a setting with micro-batches of `samples` sequences. Changes that the engine does not run come last."""
    row = make(setting, samples)
    items = sorted(row.memory.peak.nbytes.items(), key=lambda item: -item[1])
    found: list[Change] = []
    for family in _families(setting, samples):
        for what, changed, size in family:
            try:
                made = make(changed, size)
            except PlanError:  # the optimizer can't have this change
                continue
            if _helps(made, row):  # the first of a family costs least
                found.append(Change(what, made, made.time.seconds / row.time.seconds - 1))
                break
    found.sort(key=lambda change: (not change.row.runs, round(change.slower, 2), " and " in change.what))
    return Explanation(row, tuple((name, n) for name, n in items if n), tuple(found[:CHANGES]))


def _helps(made: Row, row: Row) -> bool:
    """Whether a change makes a config fit or, if it fits, frees enough memory."""
    return made.fits and (not row.fits or row.total - made.total >= WORTH_FREEING * row.cluster.gpu.memory)


def in_words(explanation: Explanation) -> list[str]:
    """The explanation as lines."""
    row = explanation.row
    memory = human_bytes(row.cluster.gpu.memory)
    verdict = "fits" if row.fits else "does not fit"
    if row.refused:
        verdict += f"; but zeroshard does not execute it yet: {row.refused}"
    lines = [
        f"{row.setting.label}: {human_bytes(row.total)} at the peak, the card has {memory}: {verdict}.",
        f"The peak is at the {row.memory.peak.label}:",
    ]
    total = row.total
    lines += [f"  {human_bytes(n):>8}  {n / total:4.0%}  {name}" for name, n in explanation.largest]
    lines.append(
        f"  {human_bytes(row.reserve):>8}  {row.reserve / total:4.0%}  allocator's slack, context, communicators"
    )
    if row.fits:
        room = f"{human_bytes(row.cluster.gpu.memory - row.total)} stay free."
        if not explanation.changes:
            return [*lines, room]
        return [*lines, f"{room} The cheapest changes that would free more:", *_listed(explanation)]
    if not explanation.changes:
        return [*lines, "No single change makes it fit; take more GPUs, or a smaller model or sequence."]
    return [*lines, "The cheapest changes that make it fit:", *_listed(explanation)]


def _listed(explanation: Explanation) -> Iterator[str]:
    for number, change in enumerate(explanation.changes, 1):
        price = f"{change.slower:+.0%} time per step" if abs(change.slower) >= 0.005 else "no slower"
        later = "" if change.row.runs else f" (not executed by this version: {change.row.refused})"
        yield f"  {number}. {change.what}: {human_bytes(change.row.total)}, {price}{later}"


def _families(setting: Setting, samples: int) -> Iterator[list[Option]]:
    """Lists of changes of one kind, the cheapest first: stage, micro-batch, checkpointing, offload, pairs."""
    off = setting.checkpointing is Checkpointing.OFF
    kept = replace(setting, checkpointing=Checkpointing.ON)
    sharded = replace(setting, stage=3)
    stages = range(setting.stage + 1, 4)
    yield [(f'"stage": {stage}', replace(setting, stage=stage), samples) for stage in stages]
    yield _smaller(setting, samples, "")
    if off:
        yield [(CHECKPOINTING, kept, samples)]
        yield [(f'"stage": {stage} and {CHECKPOINTING}', replace(kept, stage=stage), samples) for stage in stages]
        yield _smaller(kept, samples, f" and {CHECKPOINTING}")
    if setting.stage < 3:
        yield _smaller(sharded, samples, ' and "stage": 3')
    if setting.offload is Offload.NONE:
        kinds = [o for o in TABLE[1:] if allowed(o, setting.stage)]
        yield [option for o in kinds for option in _offloaded(setting, o, samples, "")]
        more = ['"stage": 3'] * (setting.stage < 3) + [CHECKPOINTING] * off
        if more:
            yield [
                option
                for o in (Offload.CPU, Offload.CPU_PARAM)
                for option in _offloaded(replace(kept, stage=3), o, samples, f" with {' and '.join(more)}")
            ]
    elif setting.offload is Offload.CPU and setting.ratio < 1:
        rest = [ratio for ratio in (*RATIOS, 1.0) if ratio > setting.ratio]
        yield [(f'"offload_optimizer.ratio": {r:g}', replace(setting, ratio=r), samples) for r in rest]


def _offloaded(setting: Setting, offload: Offload, samples: int, beside: str) -> Iterator[Option]:
    """Offloads of a growing share of the optimizer's state."""
    keys = {
        Offload.CPU: '"offload_optimizer": {"device": "cpu"',
        Offload.CPU_PARAM: '"offload_optimizer" and "offload_param": {"device": "cpu"',
        Offload.NVME: '"offload_optimizer": {"device": "nvme"',
        Offload.NVME_PARAM: '"offload_optimizer" and "offload_param": {"device": "nvme"',
    }
    for ratio in (*RATIOS, 1.0) if offload is Offload.CPU else (1.0,):
        part = f', "ratio": {ratio:g}' if ratio < 1 else ""
        yield f"{keys[offload]}{part}}}{beside}", replace(setting, offload=offload, ratio=ratio), samples


def _smaller(setting: Setting, samples: int, beside: str) -> list[Option]:
    """Micro-batches of a half, a quarter and so on, with more accumulation for the same global batch."""
    parts = [2**power for power in range(1, samples.bit_length()) if samples % 2**power == 0]
    return [(f"micro-batch {samples // n}, accumulation x {n}{beside}", setting, samples // n) for n in parts]

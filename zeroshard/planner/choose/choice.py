"""Chooses a row, and says in a sentence why each of the others was not chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroshard.plan.report import human_bytes
from zeroshard.planner.predict.rows import SAFE_SHARE, Row, Setting
from zeroshard.planner.predict.tiers import Offload

SAME_SPEED = 0.01
"""Rows whose steps differ by a smaller share are taken as equally fast; the one that takes less memory is chosen."""
EQUAL = 0.0005
"""Difference of steps, as a share, below which no difference is reported."""

OFFLOAD_GAIN = 0.10
"""Offload is chosen only if it is faster by a larger share: it needs copies that overlap with compute, and takes the
host's memory and the link from other uses."""


@dataclass(frozen=True)
class Choice:
    """The chosen row (None if no row that runs fits) and a sentence for every setting."""

    row: Row | None
    reasons: Mapping[Setting, str]


def choose(rows: Sequence[Row]) -> Choice:
    """Choose the fastest row that runs and fits with some memory to spare; of equally fast rows the smallest."""
    able = [row for row in rows if row.fits and row.runs]
    if not able:
        return Choice(None, {row.setting: _obstacle(row) for row in rows})
    able = [row for row in able if not _is_tight(row)] or able
    quickest = min(row.time.seconds for row in able)
    plain = [row for row in able if row.setting.offload is Offload.NONE]
    if any(row.time.seconds <= quickest * (1 + OFFLOAD_GAIN) for row in plain):
        able, quickest = plain, min(row.time.seconds for row in plain)
    close = [row for row in able if row.time.seconds <= quickest * (1 + SAME_SPEED)]
    best = min(close, key=lambda row: row.total)
    return Choice(best, {row.setting: _reason(row, best) for row in rows})


def _reason(row: Row, best: Row) -> str:
    if row is best:
        room = human_bytes(row.cluster.gpu.memory - row.total)
        return f"The choice: nothing that fits with some room is faster, and {room} stay free."
    if not (row.fits and row.runs):
        return _obstacle(row)
    slower = row.time.seconds / best.time.seconds - 1
    if _is_tight(row) and not _is_tight(best):
        room = human_bytes(row.cluster.gpu.memory - row.total)
        return f"Fits with only {room} to spare, which fragmentation may eat; {_relative(slower)}."
    saved = best.total - row.total
    larger = f", and {human_bytes(-saved)} larger" if saved < 0 else ""
    if abs(slower) < EQUAL:
        return f"As fast as the choice{larger}."
    if slower < 0 and row.setting.offload is not Offload.NONE:
        return f"{-slower:.1%} faster by the plan, which is too little for what it takes of the host and the link."
    if slower < 0:
        return f"{-slower:.1%} faster by the plan, too little to count{larger}."
    if slower <= SAME_SPEED:
        return f"{slower:.1%} slower than the choice{larger}."
    if saved > 0:
        return f"{slower:.0%} slower than the choice; would free {human_bytes(saved)} more."
    return f"{slower:.0%} slower than the choice and {human_bytes(-saved)} larger."


def _is_tight(row: Row) -> bool:
    return row.total > SAFE_SHARE * row.cluster.gpu.memory


def _relative(slower: float) -> str:
    if abs(slower) < EQUAL:
        return "as fast as the choice"
    return f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'} than the choice"


def _obstacle(row: Row) -> str:
    if row.total > row.cluster.gpu.memory:
        kind, nbytes = max(row.memory.peak.nbytes.items(), key=lambda item: item[1])
        short = human_bytes(row.total - row.cluster.gpu.memory)
        moment = row.memory.peak.label
        return f"Does not fit: {short} too much, most of it {kind} ({human_bytes(nbytes)}), at the {moment}."
    if row.host > row.cluster.host_memory:
        needed, there = human_bytes(row.host), human_bytes(row.cluster.host_memory)
        return f"Does not fit: {needed} on the host of a node, which has {there}."
    return f"Would fit, but zeroshard does not execute it yet: {row.refused}."

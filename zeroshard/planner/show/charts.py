"""The data of the charts, for the HTML page and the picture: colours, memory over a step, time by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.planner.predict.rows import Row
from zeroshard.planner.show.tables import COLUMNS

COLOURS = {
    "param": "#3b6fb6",
    "grad": "#d9822b",
    "master": "#6a51a3",
    "moments": "#9a86c8",
    "activ.": "#2a9d8f",
    "logits": "#8ab17d",
    "slots": "#c7a740",
    "reserve": "#a3adba",
}
"""Colours of the columns of device memory; they differ in lightness, too."""
LONG_NAMES = {
    "param": "parameters",
    "grad": "gradients",
    "master": "master weights",
    "moments": "moments",
    "activ.": "activations",
    "logits": "logits and loss",
    "slots": "slots and workspaces",
    "reserve": "framework reserve",
}
TIME_COLOURS = ("#3b6fb6", "#2a9d8f", "#8ab17d", "#d9822b", "#c7a740", "#9a86c8", "#6a51a3", "#b3554a")
STACK = ("moments", "master", "param", "slots", "grad", "activ.", "logits")
"""Columns from the bottom up: what rests first, then what changes during a step."""


@dataclass(frozen=True)
class MemorySeries:
    """Memory over a step: labels of the segments, and the bytes of each for every column of STACK."""

    labels: tuple[str, ...]
    layers: tuple[tuple[int, ...], ...]

    @property
    def tops(self) -> list[int]:
        """Bytes of each segment, all columns together."""
        return [sum(layer[index] for layer in self.layers) for index in range(len(self.labels))]


def memory_series(row: Row) -> MemorySeries:
    """The peak of each segment of a step, in order."""
    moments = row.memory.moments
    layers = tuple(
        tuple(sum(moment.nbytes.get(kind, 0) for kind in COLUMNS[name]) for moment in moments) for name in STACK
    )
    return MemorySeries(tuple(moment.label for moment in moments), layers)


def time_series(row: Row) -> list[tuple[str, float]]:
    """Seconds of the compute stream by kind, the largest first, then the seconds in which it waits."""
    found = sorted(row.time.compute.items(), key=lambda item: -item[1])
    return [*((name, seconds) for name, seconds in found if seconds > 0), ("waiting", row.time.exposed)]


def scale_of(rows: Sequence[Row]) -> float:
    """Bytes at the right end of the bars: at most the memory of 2.5 cards, so that bars that fit stay readable."""
    capacity = rows[0].cluster.gpu.memory
    return min(max(max(row.total for row in rows), capacity * 1.05), 2.5 * capacity)

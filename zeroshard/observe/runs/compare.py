"""The steps of several ranks side by side: who keeps the others waiting, and by which component of its steps.

    own        what a rank needs without its waits for other ranks
    excess     own, less what the others need in the same step
    common     what every rank needs: the least of all

A wait for others says nothing of the rank that waits, so it is left out of `own`. On a GPU it is known of some steps,
which are compared then. In a log without such steps it can't be told from the passes, and only data, the script and the
host's own waits are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from zeroshard.observe.host import BETWEEN, LINK
from zeroshard.observe.record import StepRecord
from zeroshard.observe.runs.components import (
    OWN,
    Component,
    collective_seconds,
    components_of,
    is_collective,
    with_waits,
)
from zeroshard.observe.runs.log import Run

_WARM = 3
"""Steps at the beginning that are left out: they compile, take memory and learn the order of the units."""

_LEAST_KNOWN = 4
"""Steps with the waits of a device below which all steps are compared, without them."""


@dataclass(frozen=True)
class Side:
    """The steps of one rank."""

    steps: Sequence[StepRecord]
    components: Sequence[Mapping[Component, float]]
    own: Sequence[float]


class Comparison:
    """Ranks beside each other, over the steps that all of them have.

    Attributes:
        sides: by rank.
        usual, mean: seconds of a step, the median and the mean; what is a mean itself is compared with the mean.
        total: seconds of all steps.
        on_device: whether the times are those of a device, and not of the host.
    """

    def __init__(self, runs: Mapping[int, Run]) -> None:
        self.on_device = any(run.device != "cpu" for run in runs.values())
        known = {rank: with_waits(run.steps, run.device) for rank, run in runs.items()}
        self._waits_known = all(len(steps) >= _LEAST_KNOWN for steps in known.values())
        compared = known if self._waits_known else {rank: run.steps for rank, run in runs.items()}
        timed = {rank: {one.step: one for one in steps if one.whole} for rank, steps in compared.items()}
        numbers = sorted(set.intersection(*(set(steps) for steps in timed.values())))
        numbers = numbers[_WARM:] if len(numbers) > 2 * _WARM else numbers[1:]
        self.sides = {rank: self._side([steps[n] for n in numbers]) for rank, steps in timed.items()}
        wholes = [fmean(side.steps[i].whole or 0.0 for side in self.sides.values()) for i in range(len(numbers))]
        self.usual, self.total = (median(wholes) if wholes else 0.0), sum(wholes)
        self.mean = self.total / len(wholes) if wholes else 0.0
        self.numbers, self.wholes = numbers, wholes

    def _side(self, steps: Sequence[StepRecord]) -> Side:
        components = [components_of(step) for step in steps]
        own = [sum(seconds for one, seconds in found.items() if self.is_own(one)) for found in components]
        return Side(steps, components, own)

    def is_own(self, component: Component) -> bool:
        """Whether it says something of the rank that needs it, and not of those that it waits for."""
        part, kind = component
        if is_collective(component) or kind == LINK:
            return False
        return self._waits_known or kind != OWN or part == BETWEEN

    def excess(self, rank: int) -> list[float]:
        """Seconds by step that a rank needs more than the others do."""
        others = [side.own for other, side in self.sides.items() if other != rank]
        return [mine - median(theirs) for mine, *theirs in zip(self.sides[rank].own, *others, strict=True)]

    def grown(self, rank: int, steps: Sequence[int]) -> dict[Component, float]:
        """Mean seconds by component, over steps by their places, that a rank needs more than the others do."""
        mine = self._means(rank, steps)
        theirs = [self._means(other, steps) for other in self.sides if other != rank]
        return {one: mine.get(one, 0.0) - median([m.get(one, 0.0) for m in theirs]) for one in mine}

    def _means(self, rank: int, steps: Sequence[int]) -> dict[Component, float]:
        sums: dict[Component, float] = {}
        for place in steps:
            for component, seconds in self.sides[rank].components[place].items():
                sums[component] = sums.get(component, 0.0) + seconds
        return {component: seconds / len(steps) for component, seconds in sums.items()}

    def common(self) -> dict[Component, float]:
        """Mean seconds by component that every rank needs."""
        found: dict[Component, float] = {}
        for place in range(len(self.numbers)):
            of_ranks = [side.components[place] for side in self.sides.values()]
            for component in set.intersection(*(set(one) for one in of_ranks)):
                found[component] = found.get(component, 0.0) + min(one[component] for one in of_ranks)
        return {component: seconds / len(self.numbers) for component, seconds in found.items()}

    def exposed(self) -> list[float]:
        """Seconds by step that even the rank that comes last waits for collectives."""
        return [
            min(collective_seconds(side.components[place]) for side in self.sides.values())
            for place in range(len(self.numbers))
        ]

    def figure(self, rank: int, name: str, steps: Sequence[int]) -> float:
        """Mean of a figure of the host over steps by their places; 0.0 where it is not known."""
        return fmean(self.sides[rank].steps[place].host.get(name, 0.0) for place in steps)

    def more(self, rank: int, name: str, steps: Sequence[int]) -> float:
        """How much higher a figure of the host is than on the other ranks."""
        others = [self.figure(other, name, steps) for other in self.sides if other != rank]
        return self.figure(rank, name, steps) - median(others)

    def busy(self, rank: int, steps: Sequence[int]) -> float:
        """Mean seconds on the processor, in the parts of a step, that a rank needs more than the others do."""
        return self._busy(rank, steps) - median([self._busy(other, steps) for other in self.sides if other != rank])

    def queued(self, rank: int, steps: Sequence[int]) -> float:
        """Mean seconds that a rank waits for a processor, beyond what it would if each second of work waited as theirs.

        Where ranks share too few processors, one with more work also waits more, which is no cause of its own.
        """
        shares = [
            self.figure(other, "queued", steps) / busy
            for other in self.sides
            if other != rank and (busy := self._busy(other, steps)) > 0
        ]
        return self.figure(rank, "queued", steps) - self._busy(rank, steps) * (median(shares) if shares else 0.0)

    def _busy(self, rank: int, steps: Sequence[int]) -> float:
        return fmean(sum(self.sides[rank].steps[place].busy.values()) for place in steps)

    def tokens(self, rank: int, steps: Sequence[int]) -> tuple[float, float] | None:
        """Mean tokens of a rank and of the others; None where they are not counted."""

        def mean(one: int) -> float | None:
            found = [self.sides[one].steps[place].tokens for place in steps]
            return fmean(n for n in found if n is not None) if all(n is not None for n in found) else None

        mine, theirs = mean(rank), [mean(other) for other in self.sides if other != rank]
        known = [one for one in theirs if one is not None]
        return None if mine is None or len(known) < len(theirs) or not all(known) else (mine, median(known))

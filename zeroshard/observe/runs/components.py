"""The components of a step on one rank: what each part computed itself, and what it waited for; together the step.

    forward own 80 | forward all-gather 12 | forward gc 3 | backward own ... | between own 2 | between data 40

`own` is what is left of a part without its waits. Where the device is a GPU, compute waits for collectives and not the
host: they are known of the steps that `zeroshard.observe.device_waits` timed, and within `own` of their part in others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroshard.observe.device_waits import merged
from zeroshard.observe.host import BETWEEN, OWN_WAITS
from zeroshard.observe.record import StepRecord
from zeroshard.observe.times import PARTS

Component = tuple[str, str]
"""A part of the step, and what was waited for in it, or `OWN`."""
OWN = "own"


def parts_of(step: StepRecord) -> dict[str, float]:
    """Seconds of a step by part, with what lies between; they sum up to the step."""
    assert step.whole is not None
    parts = {part: step.seconds.get(part, 0.0) for part in PARTS}
    return {**parts, BETWEEN: step.whole - sum(parts.values())}


def components_of(step: StepRecord) -> dict[Component, float]:
    """Seconds by component; they sum up to the step, unless a GPU runs behind a host that waits."""
    found: dict[Component, float] = {}
    waits_of_parts = merged(step.waits, step.device_waits or {})
    for part, seconds in parts_of(step).items():
        waits = waits_of_parts.get(part, {})
        for kind, waited in waits.items():
            found[part, kind] = waited
        found[part, OWN] = max(seconds - sum(waits.values()), 0.0)
    return found


def with_waits(steps: Sequence[StepRecord], device: str) -> Sequence[StepRecord]:
    """The steps whose waits for collectives are known: on a GPU those that were timed, if there are any."""
    return steps if device == "cpu" else [step for step in steps if step.device_waits is not None]


def is_collective(component: Component) -> bool:
    """Whether it is a wait for other ranks."""
    return component[1] != OWN and component[1] not in OWN_WAITS


def collective_seconds(components: Mapping[Component, float]) -> float:
    """Seconds of waits for other ranks."""
    return sum(seconds for component, seconds in components.items() if is_collective(component))

"""Gradients that come when those of their unit have been reduced: another module than the unit's own reads a parameter.

    forward     the model reads blocks.1.weight; blocks.0, blocks.1, blocks.2 run
    backward    blocks.2, blocks.1 (reduced), blocks.0; what the model itself read: the gradient of blocks.1.weight

Where parameters rest whole nothing is seen of the read itself. So what came late passes once more through a reduce, in
memory taken for it, and is added to what rests; the unit is then reduced at the end (see outside_reads). Rejected: to
reduce all units at the end of the first backward, which needs memory for all whole gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.engine.core.gradients import Gradients
from zeroshard.engine.core.streams import Streams
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.unit import Unit
from zeroshard.plan.legs import Stream
from zeroshard.sharding.resting import unguarded


def add_late_gradients(units: Sequence[Unit], gradients: Gradients, streams: Streams, factor: float) -> list[int]:
    """After a backward: add what came late to the gradients of its units, times `factor`; returns the units."""
    with unguarded():
        late = [unit for unit in units if any(map(_has_gradient, unit.trainable))]
        for unit in late:
            # Write after write: gradients belong to the reduces in flight until they have landed.
            streams.wait(Stream.COMPUTE, streams.record(Stream.REDUCE, "all"))
            for group in filter(_has_gradient, unit.trainable):
                gradients.add_late(unit, group, factor)
    return [unit.index for unit in late]


def _has_gradient(group: Group) -> bool:
    return any(parameter.grad is not None for parameter in group.parameters)

"""Adds late gradients: they arrive after their unit was reduced, since a module of another unit reads the parameter.

    forward     the model reads blocks.1.weight; blocks.0, blocks.1, blocks.2 run
    backward    blocks.2, blocks.1 (reduced), blocks.0; what the model itself read: the gradient of blocks.1.weight

If parameters rest whole the engine does not notice the read itself. So the late gradient is reduced separately, in
extra memory, and added to the resting gradient; from the next backward on the unit is reduced at the end (see
outside_reads). Rejected: reducing all units at the end of the first backward, which needs memory for all whole
gradients.
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
    """After a backward: add late gradients, times `factor`, to those of their units; returns the units' numbers."""
    with unguarded():
        late = [unit for unit in units if any(map(has_gradient, unit.trainable))]
        for unit in late:
            # Write after write: running reduces still write the gradients until they have finished.
            streams.wait(Stream.COMPUTE, streams.record(Stream.REDUCE, "all"))
            for group in filter(has_gradient, unit.trainable):
                gradients.add_late(unit, group, factor)
    return [unit.index for unit in late]


def has_gradient(group: Group) -> bool:
    """Whether autograd has left a gradient on any parameter of the group."""
    return any(parameter.grad is not None for parameter in group.parameters)

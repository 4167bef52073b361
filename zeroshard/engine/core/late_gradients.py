"""Gradients that come when those of their unit have been reduced: another module than the unit's own reads a parameter.

    forward     the model reads blocks.1.weight; blocks.0, blocks.1, blocks.2 run
    backward    blocks.2, blocks.1 (reduced), blocks.0; what the model itself read: the gradient of blocks.1.weight

Where parameters rest whole nothing is seen of the read itself. So what came late passes once more through a reduce, in
memory taken for it, and is added to what rests; the unit is then reduced at the end (see outside_reads). Rejected: to
reduce all units at the end of the first backward, which needs memory for all whole gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.oplog import OperationLog
from zeroshard.engine.core.gradients import Gradients
from zeroshard.engine.core.streams import Stream, Streams
from zeroshard.engine.memory.group import Group, Unit
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.sharding.resting import unguarded


class LateGradients:
    """Finds them after a backward, and adds them.

    Args:
        reduces: the reduce communicator of each mesh axis.
        log: what this rank issues, in the order of the lists.
    """

    def __init__(
        self,
        units: list[Unit],
        gradients: Gradients,
        streams: Streams,
        reduces: Mapping[str, Collectives],
        log: OperationLog,
    ) -> None:
        self._units, self._gradients, self._streams = units, gradients, streams
        self._reduces, self._log = reduces, log

    def add(self, factor: float, predivide: float) -> list[int]:
        """Add what came late to the gradients of its units; returns the units. Slow: compute waits for the reduces.

        Args:
            factor: what gradients are multiplied by when they are collected.
            predivide: what they are divided by before they are summed.
        """
        with unguarded():
            late = [unit for unit in self._units if any(map(_has_gradient, unit.trainable))]
            for unit in late:
                # Write after write: gradients belong to the reduces in flight until they have landed.
                self._streams.wait(Stream.COMPUTE, self._streams.record(Stream.REDUCE, "all"))
                for group, fired in zip(unit.trainable, self._gradients.fired(unit), strict=True):
                    if _has_gradient(group):
                        self._add(unit, group, fired, factor, predivide)
        return [unit.index for unit in late]

    def _add(self, unit: Unit, group: Group, fired: list[bool], factor: float, predivide: float) -> None:
        if self._gradients.pending(unit):
            self._gradients.collect_late(group, fired, factor)
            return
        reduced = self._reduce(unit, group, self._whole(group, fired).mul_(factor).div_(predivide))
        if group.plan.grad_on_host:
            self._streams.drain()
            self._streams.settle_host()
        target = group.update_grad
        target.add_(reduced.to(target.device, target.dtype))
        self._streams.touch(writes=(("grad", unit.index),))
        self._gradients.changed(group)

    def _whole(self, group: Group, fired: list[bool]) -> torch.Tensor:
        """The late gradients of a group in wire dtype, and zeros for the others."""
        layout = group.plan.layout
        whole = torch.zeros(layout.numel, dtype=torch_dtype(group.plan.wire), device=group.device)
        for index, (parameter, segment) in enumerate(zip(group.parameters, layout.segments, strict=True)):
            if parameter.grad is not None:
                whole[segment.offset : segment.end].view(segment.shape).copy_(parameter.grad)
                parameter.grad = None
                fired[index] = True
        return whole

    def _reduce(self, unit: Unit, group: Group, whole: torch.Tensor) -> torch.Tensor:
        """The reduced gradients of what this rank updates."""
        collectives, label = self._reduces[unit.plan.axis], unit.label
        part = torch.empty(group.plan.layout.shard_numel, dtype=whole.dtype, device=whole.device)
        buffer, launch = (("late", unit.index),), self._streams.launch
        self._log.record("reduce-scatter", label, whole.nbytes)
        # Read after write: the memory belongs to compute until the gradients have been copied there.
        self._streams.wait(Stream.REDUCE, self._streams.record(Stream.COMPUTE, "collected"))
        launch(Stream.REDUCE, lambda: collectives.reduce_scatter(part, whole, label), buffer, buffer)
        if unit.plan.axis == "shard":
            replicas = self._reduces["replicate"]
            launch(Stream.REDUCE, lambda: replicas.all_reduce(part, label), buffer, buffer)
        if group.plan.update_axis is None:
            launch(Stream.REDUCE, lambda: collectives.all_gather(whole, part, label), buffer, buffer)
        # Read after write: it belongs to the reduce until that has landed.
        self._streams.wait(Stream.COMPUTE, self._streams.record(Stream.REDUCE, "all"))
        return whole if group.plan.update_axis is None else part


def _has_gradient(group: Group) -> bool:
    return any(parameter.grad is not None for parameter in group.parameters)

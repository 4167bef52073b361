"""The arguments of leg actions: the unit, group and buffers of a list of legs, and the values of one backward.

Buffers have the names by which streams order accesses to them. Rejected: passing the whole engine to each action, which
hides what the action reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zeroshard.engine.core.streams import Buffers
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.unit import Unit
from zeroshard.plan.legs import Buffer, Legs


class BackwardArgs(NamedTuple):
    """The values that change from one backward to the next.

    Attributes:
        received: per parameter, whether it has got a gradient on this rank; collecting sets it.
        factor: multiplies gradients when they are collected.
        fresh: there are no local gradients yet, so collecting overwrites the buffer.
        add: there are reduced gradients already, to which this backward's are added.
    """

    received: list[bool]
    factor: float
    fresh: bool
    add: bool


Action = Callable[[BackwardArgs], object]
Tensors = Callable[[Buffer], torch.Tensor]


@dataclass(frozen=True)
class LegContext:
    """What a list of legs works on: a group of a unit, and its buffers."""

    unit: Unit
    group: Group
    legs: Legs
    slot: int | None
    tensor: Tensors

    def names(self, *buffers: Buffer) -> Buffers:
        """The names of buffers for streams, each once."""
        return tuple(dict.fromkeys(map(self._name, buffers)))

    def _name(self, buffer: Buffer) -> tuple[str, int | None]:
        if buffer in IN_SLOT:
            return "wire", self.slot
        if buffer in IN_EXCHANGE:
            return "codes", None
        return ("late" if buffer in LATE else "grad"), self.unit.index


IN_SLOT = (Buffer.WIRE, Buffer.WIRE_PART, Buffer.STAGING)
IN_EXCHANGE = (Buffer.CODES, Buffer.ARRIVED, Buffer.MIDDLE)
LATE = (Buffer.LATE, Buffer.LATE_PART)

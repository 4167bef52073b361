"""Where a list of legs works, and what differs from one backward to the next: what makers of actions are given.

Names of buffers are those that streams order accesses by. Rejected: to hand each action the whole engine, which hides
what it reads and writes.
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
    """What differs from one backward to the next.

    Attributes:
        received: per parameter, whether it has got a gradient on this rank; collecting sets it.
        factor: what gradients are multiplied by when they are collected.
        fresh: no local gradients wait, so that collecting writes over what the buffer holds.
        add: reduced gradients rest already, to which this backward's are added.
    """

    received: list[bool]
    factor: float
    fresh: bool
    add: bool


Action = Callable[[BackwardArgs], object]
Tensors = Callable[[Buffer], torch.Tensor]


@dataclass(frozen=True)
class LegContext:
    """Where a list of legs works."""

    unit: Unit
    group: Group
    legs: Legs
    slot: int | None
    tensor: Tensors

    def names(self, *buffers: Buffer) -> Buffers:
        """What streams call buffers."""
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

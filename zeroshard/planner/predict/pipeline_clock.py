"""Computes how long the micro-batches of a step take in a pipeline, by running torch's order over a clock per rank.

An action begins when its rank is free and its input has arrived, from the part before for a forward, from the part
after for gradients of inputs. The time in which ranks wait for each other is the bubble. The same run counts how many
micro-batches each part holds activations of at once, from its forward to its last gradients. (Narayanan et al. 2021,
arXiv:2104.04473; Qi et al. 2023, arXiv:2401.10241.) Rejected: the bubble (stages - 1) / micro-batches, which holds for
equal stages and one schedule only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.pipeline.order import Action, Order, Work

_ENDS = (Work.BACKWARD, Work.WEIGHTS)
"""Actions after which a micro-batch's activations are freed."""


@dataclass(frozen=True)
class PartTime:
    """Seconds of one micro-batch in one part: its forward, gradients of inputs, and of weights."""

    forward: float
    inputs: float
    weights: float

    def of(self, work: Work) -> float:
        """Seconds of one kind of action."""
        return {
            Work.FORWARD: self.forward,
            Work.INPUTS: self.inputs,
            Work.WEIGHTS: self.weights,
            Work.BACKWARD: self.inputs + self.weights,
        }[work]

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True)
class PipelineTime:
    """A step's micro-batches in a pipeline.

    Attributes:
        seconds: until the last rank has ended.
        waiting: by rank, the seconds in which it waits.
        held: by rank, how many micro-batches it holds for each of its parts, as (part, count), when it holds most.
    """

    seconds: float
    waiting: tuple[float, ...]
    held: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        return sum(self.waiting) / (self.seconds * len(self.waiting)) if self.seconds else 0.0


def pipeline_time(order: Order, parts: Sequence[PartTime], send_seconds: float = 0.0) -> PipelineTime:
    """Run the actions of all ranks over clocks.

    Args:
        parts: times of all parts of the model, in order.
        send_seconds: seconds to send activations or gradients from one rank to another.
    """
    rank_of = {action.part: rank for rank, actions in order.items() for action in actions}
    left = {rank: list(reversed(actions)) for rank, actions in order.items()}
    free = dict.fromkeys(left, 0.0)
    busy = dict.fromkeys(left, 0.0)
    done: dict[tuple[Work, int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for rank, actions in left.items():
            while actions and (ready := _ready(actions[-1], len(parts), rank_of, done, send_seconds)) is not None:
                action = actions.pop()
                seconds = parts[action.part].of(action.work)
                free[rank] = max(free[rank], ready) + seconds
                busy[rank] += seconds
                given = Work.INPUTS if action.work is Work.BACKWARD else action.work
                done[given, action.part, action.micro] = free[rank]
                moved = True
    assert not any(left.values()), "the actions of the order wait for each other"
    end = max(free.values())
    held = tuple(_held(order[rank]) for rank in sorted(order))
    return PipelineTime(end, tuple(end - busy[rank] for rank in sorted(order)), held)


def _ready(
    action: Action, parts: int, rank_of: dict[int, int], done: dict[tuple[Work, int, int], float], send_seconds: float
) -> float | None:
    """When the input of an action arrives; None if that is not known yet."""
    if action.work is Work.WEIGHTS:
        return 0.0
    forward = action.work is Work.FORWARD
    before = action.part + (-1 if forward else 1)
    if not 0 <= before < parts:
        return 0.0
    ended = done.get((Work.FORWARD if forward else Work.INPUTS, before, action.micro))
    if ended is None:
        return None
    return ended if rank_of[before] == rank_of[action.part] else ended + send_seconds


def _held(actions: Sequence[Action]) -> tuple[tuple[int, int], ...]:
    """Micro-batches of each part at the moment when most are held, as (part, how many)."""
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in actions:
        change = 1 if action.work is Work.FORWARD else -1 if action.work in _ENDS else 0
        now[action.part] = now.get(action.part, 0) + change
        if sum(now.values()) > sum(most.values()):
            most = dict(now)
    return tuple(sorted(most.items()))

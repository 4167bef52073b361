"""Tells when all gradients of a unit have arrived, from the order in which its modules were called.

Autograd runs the nodes of a graph in the reverse order of their creation. So when the gradient of a module's output is
ready, every node created after that output has run, and a unit whose first call began later is complete. Each call
gets two numbers from one counter, at its start and its end:

    complete(unit) when gradient of call c is ready   <=>   first start of unit > end of c     in every live graph

Rejected: a hook per parameter. It costs Python for each of hundreds of parameters, and can't tell a parameter that
will get no gradient from one whose gradient has not come yet.
"""

from __future__ import annotations

import weakref


class ForwardPass:
    """The calls of one forward under grad. The hooks on its outputs hold it, so it lives as long as the graph.

    A graph outlives its backward if user code keeps the loss, for example to print it later. So after its backward a
    pass is `over`, and later backwards do not wait for its units, unless one runs through this graph again. A pass is
    `unordered` if the call numbers do not tell the order of some nodes in its graph: then its units are complete only
    at the end of the backward.
    """

    __slots__ = ("__weakref__", "first_start", "last_end", "over", "reached", "unordered")

    def __init__(self) -> None:
        self.first_start: dict[int, int] = {}
        self.last_end: dict[int, int] = {}
        self.reached = False
        self.over = False
        self.unordered = False


class CallTracker:
    """Numbers the calls of units and answers which units are complete."""

    def __init__(self) -> None:
        self._count = 0
        self._passes: list[weakref.ref[ForwardPass]] = []
        self.current: ForwardPass | None = None
        self.waits = False
        """Whether a pass has begun since the last backward ended: equal on all ranks, whatever graphs still live."""

    def begin_pass(self) -> None:
        """The model's forward begins under grad."""
        self.current = ForwardPass()
        self.waits = True
        self._passes = [ref for ref in self._passes if ref() is not None]
        self._passes.append(weakref.ref(self.current))

    def end_pass(self) -> None:
        """The forward is over; from now on only the graph keeps the pass."""
        self.current = None

    def reach(self, graph: ForwardPass) -> None:
        """A backward runs through the graph of this pass."""
        graph.reached = True
        if graph.over:  # retain_graph: backwards through other retained graphs may follow
            for live in self._live():
                live.over = False

    def lose_order(self) -> None:
        """Mark the live passes as unordered: nodes were created whose order among theirs is unknown."""
        for live in self._live():
            live.unordered = True

    def end_backward(self) -> None:
        """The backward has ended: the passes that it went through are over."""
        self.waits = False
        for live in self._live():
            live.over, live.reached = live.over or live.reached, False

    def start_call(self, unit: int) -> None:
        self._count += 1
        if self.current is not None:
            self.current.first_start.setdefault(unit, self._count)

    def end_call(self, unit: int) -> tuple[ForwardPass, int] | None:
        """The call's pass and end number, for the hook on its output; None outside of a pass."""
        self._count += 1
        if self.current is None:
            return None
        self.current.last_end[unit] = self._count
        return self.current, self._count

    def recomputed_call(self, unit: int) -> int:
        """The end number of a call that reentrant checkpointing repeats: the latest one that is possible."""
        ends = [live.last_end.get(unit, 0) for live in self._live()]
        return max(ends, default=0) or self._count

    def complete(self, unit: int, end: int) -> bool:
        """Whether every gradient of `unit` has arrived when the gradient of the call that ended at `end` is ready."""
        return all(
            live.over or (live.first_start.get(unit, end + 1) > end and not live.unordered) for live in self._live()
        )

    def _live(self) -> list[ForwardPass]:
        return [live for live in (ref() for ref in self._passes) if live is not None]

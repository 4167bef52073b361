"""Knows when all gradients of a unit have arrived, from the order in which its modules were called.

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
    """The calls of one forward under grad. Held by the hooks on its outputs, so it lives as long as the graph.

    A graph outlives its backward where somebody keeps the loss, to print it later say. So a pass that a backward went
    through is `over`, and no later backward waits for its units; it counts again when a backward comes back to it.
    A pass is `unordered` if its graph has nodes of which the numbers of calls say nothing: its units are complete when
    the backward has ended.
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
        if graph.over:  # retain_graph: others may follow whose graphs were kept with it
            for live in self._live():
                live.over = False

    def lose_order(self) -> None:
        """Nodes were made whose place among those of the live passes is not known."""
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
        """End number for a call that reentrant checkpointing repeats: the latest it can have been."""
        ends = [live.last_end.get(unit, 0) for live in self._live()]
        return max(ends, default=0) or self._count

    def complete(self, unit: int, end: int) -> bool:
        """Whether every gradient of `unit` has arrived when the gradient of the call that ended at `end` is ready."""
        return all(
            live.over or (live.first_start.get(unit, end + 1) > end and not live.unordered) for live in self._live()
        )

    def _live(self) -> list[ForwardPass]:
        return [live for live in (ref() for ref in self._passes) if live is not None]

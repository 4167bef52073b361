"""Units whose parameters other modules read: fused losses take the head's weight, tied heads the embedding's.

    first read    a forward uses a resting parameter: all ranks gather its unit, at the same place of their lists, into
                  extra memory, where it stays to the end of the pass's backward
    next passes   until the step: the unit is gathered so at the begin of each pass
    next steps    the plan keeps the unit gathered for whole passes, in a slot of its own (`Plan.kept`)

Reads of units that rest whole are not noticed; their late gradient shows them (see late_gradients). A unit that was
read from outside is complete when the backward has passed everything after the first read, or, if it was whole from the
begin of the pass, at the end of the backward. If only some ranks read, the others miss a gather, which the operation
logs show. Rejected: asking users to register what their modules read (they can't know what libraries do), and gathering
again for each operation (autograd saves views of what it read).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zeroshard.engine.core.autograd import in_backward
from zeroshard.engine.core.parameters import Parameters
from zeroshard.engine.core.passes import CallTracker
from zeroshard.engine.memory.unit import Unit


class OutsideReads:
    """Gathers resting units when other modules read them, and remembers these units.

    Args:
        units: all units of the model; reads of their resting parameters call this object from now on.
        parameters: gathers and releases them.
        tracker: learns when a unit was first read.
        in_forward: whether a forward of the model, or of a part of it that reads the root, is running. The forward of a
            single unit does not count, since the engine would not notice if it ended in an exception.

    Attributes:
        kept: units that the plan keeps whole for each pass: the root, and those read before.
    """

    def __init__(
        self, units: list[Unit], parameters: Parameters, tracker: CallTracker, in_forward: Callable[[], bool]
    ) -> None:
        self._units = units
        self._parameters = parameters
        self._tracker = tracker
        self._new: list[int] = []
        self.kept: tuple[int, ...] = ()
        self._in_forward = in_forward
        for unit in units:
            for group in unit.groups:
                for record in group.records:
                    record.fetch = partial(self._fetch, unit.index)

    def _fetch(self, index: int) -> None:
        """Gather a resting unit that is about to be read; does nothing where not all ranks need to take part."""
        if not self._in_forward() and not in_backward():
            return
        if index in self.kept:
            self._parameters.use(index)
            return
        self.keep_gathered(index)
        if not in_backward():
            self._tracker.start_call(index)
        self._parameters.gather_beside(index)

    def keep_gathered(self, index: int) -> None:
        """Gather the unit at the begin of each pass from now on."""
        if index not in self._new and index not in self.kept:
            self._new.append(index)

    def begin_pass(self) -> None:
        """A forward begins."""
        for index in self._new:
            self._tracker.start_call(index)
        self.begin_backward()

    def begin_backward(self) -> None:
        """A backward begins, of a graph in which the units may have been read."""
        for index in self._new:
            self._parameters.gather_beside(index)

    def release(self) -> None:
        """A pass without gradients is over."""
        for index in self.kept:
            self._parameters.release(index)
        self._parameters.free_beside()

    def forget(self) -> None:
        """The model is closed: resting parameters are no longer fetched."""
        for unit in self._units:
            for group in unit.groups:
                for record in group.records:
                    record.fetch = None

    def take_new(self) -> tuple[int, ...]:
        """Take the list of units that the plan has to keep from now on."""
        new, self._new = tuple(self._new), []
        return new

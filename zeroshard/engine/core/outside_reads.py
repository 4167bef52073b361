"""Units whose parameters other modules read: fused losses take the head's weight, tied heads the embedding's.

    first read    a resting parameter meets an operation in a forward: the unit is gathered into memory of its own, on
                  all ranks at the same place of their lists, and stays whole to the end of the pass's backward
    next passes   before the step: the same from the beginning of the pass
    next steps    the plan keeps the unit gathered for whole passes, in a slot of its own (`Plan.kept`)

Of units that rest whole a read is not seen; the gradient that comes late tells of it (see late_gradients).
A unit that is read so is complete when the backward has passed all that came after the first read; where it is whole
from the beginning of a pass, when that backward ends. A read that some ranks make alone is a gather that the others
lack, which the logs of operations show. Rejected: asking users to register what their modules read (they can't know
what libraries do), and gathering anew for each operation (autograd saves views of what it read).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zeroshard.engine.core.autograd import in_backward
from zeroshard.engine.core.parameters import Parameters
from zeroshard.engine.core.passes import CallTracker
from zeroshard.engine.memory.unit import Unit


class OutsideReads:
    """Gathers resting units when they are read, and remembers them.

    Args:
        units: all units of the model, whose resting parameters ask here from now on.
        parameters: gathers and releases them.
        tracker: learns when a unit was first read.
        in_forward: whether a forward of the model, or of a part of it that reads the root, is running. One of a unit by
            itself does not count: nobody would tell if an exception ended it.

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
        """Something is about to read a unit that rests. Nothing is done where not all ranks come by."""
        if not self._in_forward() and not in_backward():
            return
        if index in self.kept:
            self._parameters.use(index)
            return
        self.keep_gathered(index)
        if not in_backward():
            self._tracker.start_call(index)
        self._parameters.hold(index)

    def keep_gathered(self, index: int) -> None:
        """Have the unit whole from the beginning of each pass."""
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
            self._parameters.hold(index)

    def release(self) -> None:
        """A pass without gradients is over."""
        for index in self.kept:
            self._parameters.release(index)
        self._parameters.let_go()

    def forget(self) -> None:
        """The model is closed: parameters that rest have nobody to fetch them any more."""
        for unit in self._units:
            for group in unit.groups:
                for record in group.records:
                    record.fetch = None

    def take_new(self) -> tuple[int, ...]:
        """The units that the plan does not keep yet, which are forgotten: it will."""
        new, self._new = tuple(self._new), []
        return new

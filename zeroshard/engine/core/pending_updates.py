"""Pending updates: a step starts to update units whose state rests in host memory, and a later forward awaits them.

    step n       defer(unit, finish)               the update has begun on other threads
    forward      finish(unit)           -> event   waits for the update and starts the copy of the parameters
    backward     take_read_event(unit)  -> event   after it gradients may overwrite the buffers that the update read

No update is lost if no forward follows: everything that reads parameters drains first, which finishes all updates.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from zeroshard.engine.core.streams import Event


class PendingUpdates:
    """The pending updates, by unit.

    Attributes:
        timed: makes a context around each wait for an update, if anything times them.
    """

    def __init__(self) -> None:
        self.timed: Callable[[], AbstractContextManager[None]] | None = None
        self._finish: dict[int, Callable[[], Event]] = {}
        self._read: dict[int, Event] = {}
        self._ended: dict[int, Callable[[], object]] = {}

    def defer(self, unit: int, finish: Callable[[], Event], ended: Callable[[], object] | None = None) -> None:
        """Add an update that has begun.

        Args:
            finish: waits for the update, and returns the event after which the shards are written.
            ended: waits for the end of the update, on any thread; used by reads of shards that do not lie in place.
        """
        assert unit not in self._finish, "an update begins before the one before it was finished"
        self._finish[unit] = finish
        if ended is not None:
            self._ended[unit] = ended

    def wait_for_end_of(self, unit: int) -> Callable[[], object] | None:
        """A function that waits, on any thread, for the end of a pending update; None if none is pending."""
        return self._ended.get(unit) if unit in self._finish else None

    def is_pending(self, unit: int) -> bool:
        """Whether the unit has a pending update."""
        return unit in self._finish

    def finish(self, unit: int) -> Event:
        """Finish a pending update; returns the event after which the unit's shards are written.

        An update that failed stays pending: each later call raises the same error, so that no half step is ever used.
        """
        if self.timed is None:
            event = self._finish[unit]()
        else:
            with self.timed():
                event = self._finish[unit]()
        del self._finish[unit]
        self._ended.pop(unit, None)
        return event

    def set_read_event(self, unit: int, event: Event) -> None:
        """Record that the update reads the unit's gradients until `event`."""
        self._read[unit] = event

    def take_read_event(self, unit: int) -> Event | None:
        """Take the event after which the unit's gradients may be overwritten; None if there is no such event."""
        return self._read.pop(unit, None)

    @property
    def units(self) -> list[int]:
        """The units with pending updates, in the order in which these began."""
        return list(self._finish)

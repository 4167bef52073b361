"""Updates of units whose state rests in host memory, from the step that orders them to the forward that needs them.

    step n       defer(unit, finish)           the update has begun, elsewhere
    forward      written(unit)   -> event      finish() waits for it and starts the copy of the parameters
    backward     read(unit)      -> event      gradients may come into the buffers that the update read

Nothing is lost when a forward does not come: whoever reads parameters drains, and that finishes everything.
"""

from __future__ import annotations

from collections.abc import Callable

from zeroshard.engine.core.streams import Event


class PendingUpdates:
    """What is under way, by unit."""

    def __init__(self) -> None:
        self._finish: dict[int, Callable[[], Event]] = {}
        self._read: dict[int, Event] = {}
        self._ended: dict[int, Callable[[], object]] = {}

    def defer(self, unit: int, finish: Callable[[], Event], ended: Callable[[], object] | None = None) -> None:
        """An update has begun. `finish` waits for it and returns the point after which the shards are written.

        Args:
            ended: returns, on any thread, when it has ended; for what reads shards that do not lie in place.
        """
        assert unit not in self._finish, "an update begins before the one before it was finished"
        self._finish[unit] = finish
        if ended is not None:
            self._ended[unit] = ended

    def wait_for_end_of(self, unit: int) -> Callable[[], object] | None:
        """What waits, on any thread, for an update that is under way; None where there is none."""
        return self._ended.get(unit) if unit in self._finish else None

    def is_pending(self, unit: int) -> bool:
        """Whether an update is under way that nobody has finished."""
        return unit in self._finish

    def finish(self, unit: int) -> Event:
        """Finish an update that is under way; the point after which the unit's shards are written.

        Where it failed it stays under way: whoever comes next gets the same error, and never a part of a step.
        """
        event = self._finish[unit]()
        del self._finish[unit]
        self._ended.pop(unit, None)
        return event

    def set_read_event(self, unit: int, event: Event) -> None:
        """The update reads the unit's gradients until `event`."""
        self._read[unit] = event

    def take_read_event(self, unit: int) -> Event | None:
        """The point after which the unit's gradients may be written again, asked for once; None if that is now."""
        return self._read.pop(unit, None)

    @property
    def units(self) -> list[int]:
        """The units whose updates nobody has finished, in the order in which they began."""
        return list(self._finish)

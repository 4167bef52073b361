"""Who hears of each step: what goes to the monitor, and the line of `wall_clock_breakdown`."""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.engine.observing import Disk, StepFacts
from zeroshard.observe.monitor import EventMonitor, events_of
from zeroshard.observe.record import StepRecord
from zeroshard.observe.times import PARTS


class Silent:
    """A listener that does nothing; others take from it what they don't need."""

    def heard(self, record: StepRecord) -> None:
        """Nothing."""

    def report(self, facts: StepFacts, *, due: bool) -> None:
        """Nothing."""

    def disk(self, what: Disk, seconds: float, left_out: Sequence[str]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class ToMonitor(Silent):
    """Writes each step as events."""

    def __init__(self, monitor: EventMonitor, *, breakdown: bool) -> None:
        self._monitor = monitor
        self._breakdown = breakdown

    def heard(self, record: StepRecord) -> None:
        """Write the step."""
        rate = None if not record.whole else record.batch / record.whole
        self._monitor.write_events(events_of(record, breakdown=self._breakdown, samples_per_second=rate))


class BreakdownLine(Silent):
    """Prints where the time goes: mean milliseconds of a step, of the steps that the device has done by now.

    Args:
        every_step: print after each step, where no lines of progress are asked for.
    """

    def __init__(self, *, every_step: bool) -> None:
        self._every_step = every_step
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._steps = 0

    def heard(self, record: StepRecord) -> None:
        """Count the step."""
        self._steps += 1
        for part in PARTS:
            self._totals[part] += record.seconds[part]

    def report(self, facts: StepFacts, *, due: bool) -> None:
        """Print the line where it is due and any step has passed."""
        if self._steps and (due or self._every_step):
            mean = ", ".join(f"{part} {total / self._steps * 1000:.2f} ms" for part, total in self._totals.items())
            many = "s" if self._steps > 1 else ""
            print(f"step {facts.step}: {mean} (mean of {self._steps} step{many})", flush=True)
            self._totals, self._steps = dict.fromkeys(PARTS, 0.0), 0

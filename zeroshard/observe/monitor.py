"""DeepSpeed's monitor: events with a name, a value and a number of samples, to every writer that the config asks for.

Only rank 0 writes. A value that lies on the device is written when it has arrived, behind those that came before it.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from zeroshard.engine.observing import Event
from zeroshard.errors import ZeroShardWarning
from zeroshard.observe.late import LateNumber
from zeroshard.observe.record import StepRecord

_PREFIX = "Train/Samples/"
Written = tuple[str, float, int]


class Writer(Protocol):
    """Where events go."""

    def write(self, events: Sequence[Written]) -> None: ...

    def close(self) -> None: ...


class EventMonitor:
    """Hands events to writers.

    Args:
        writers: none on ranks that don't write.
        enabled: whether the config asks for any, equal on all ranks.
    """

    def __init__(self, writers: Sequence[Writer], *, enabled: bool) -> None:
        self.enabled = enabled
        self._writers = list(writers)
        self._late: deque[tuple[str, LateNumber, int]] = deque()

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write (name, value, samples) triples; on all ranks but 0 nothing. A value may be a tensor on the device."""
        if not self._writers:
            return
        self._late.extend((name, LateNumber(value), int(samples)) for name, value, samples in event_list)
        self.flush()

    def flush(self) -> None:
        """Write what has arrived."""
        ready = list(self._arrived())
        if not ready:
            return
        for writer in tuple(self._writers):
            try:
                writer.write(ready)
            except Exception as error:  # a full disk or a server that is gone must not end the training
                self._writers.remove(writer)
                _warn(f"{type(writer).__name__} of the monitor writes nothing from here on", error)
                with suppress(Exception):  # it fails again where it holds what it could not write
                    writer.close()

    def _arrived(self) -> Iterator[Written]:
        while self._late and self._late[0][1].arrived:
            name, value, samples = self._late.popleft()
            yield name, value.read(), samples

    def close(self) -> None:
        """Write what has arrived, and end the writers."""
        self.flush()
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:
                _warn(f"{type(writer).__name__} of the monitor may have lost its last events", error)


def _warn(what: str, error: Exception) -> None:
    warnings.warn(f"{what}: {str(error) or type(error).__name__}", ZeroShardWarning, stacklevel=2)


def events_of(record: StepRecord, *, breakdown: bool, samples_per_second: float | None) -> list[Event]:
    """The events of a step, with DeepSpeed's names where it has one."""
    found: list[tuple[str, float | None]] = [
        ("train_loss", record.loss),
        ("lr", record.rates[0] if record.rates else None),
        ("loss_scale", record.scale),
        ("grad_norm", record.norm),
        ("skipped_steps", float(record.skipped)),
        ("samples_per_second", samples_per_second),
    ]
    if breakdown:
        found += [(f"elapsed_time_ms_{part}", seconds * 1000) for part, seconds in record.seconds.items()]
    return [(_PREFIX + name, value, record.samples) for name, value in found if value is not None]

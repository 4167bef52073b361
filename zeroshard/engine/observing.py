"""The interface by which an engine reports its steps to an observer; `zeroshard.observe` implements it.

    forward(...)     around each forward
    backward(loss)   around each backward that the engine starts
    update(facts)    around the update of a step
    concluded(...)   once, when the outcome of that step has reached the host
    timed            passes the batches of the engine's data loader on

An engine has one observer or none, which is decided when it is built; without one a step has no extra cost. An observer
never waits for the device and never communicates: it reads values from the device only after their copies have arrived.
Rejected: callbacks that users register, each of which would have to keep these rules itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Event = tuple[str, Any, int]
"""A name, a value (a number, or a tensor of one element), and the place on the x-axis, in samples."""
Disk = Literal["save", "load"]
TimedBatches = Callable[[Iterator[Any]], Iterator[Any]]
"""Gives the same batches, and times the wait for each."""


@dataclass(frozen=True)
class StepFacts:
    """The facts of a step when its update begins.

    Attributes:
        step: its number, from 1.
        samples: of all steps over all ranks, this one included.
        batch: samples of this step over all ranks.
        micro_batches: of this step, on each rank.
        rates: learning rate of each parameter group.
        scale: the loss scale, on the device; None without one.
    """

    step: int
    samples: int
    batch: int
    micro_batches: int
    rates: Sequence[float]
    scale: torch.Tensor | None


class Outcome(Protocol):
    """The outcome of a step: whether it was applied, the norm, and the first parameter that held inf or NaN."""

    @property
    def applied(self) -> bool: ...

    @property
    def norm(self) -> float | None: ...

    @property
    def nonfinite(self) -> str | None: ...


class Monitor(Protocol):
    """Where events are written, as DeepSpeed's `engine.monitor`."""

    @property
    def enabled(self) -> bool: ...

    def write_events(self, event_list: Iterable[Event]) -> None: ...


class Throughput(Protocol):
    """How fast the steps are."""

    def avg_samples_per_sec(self) -> float: ...


class Observer(Protocol):
    """Watches the steps of one engine."""

    @property
    def monitor(self) -> Monitor: ...

    @property
    def throughput(self) -> Throughput: ...

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]: ...

    def backward(self, loss: torch.Tensor) -> AbstractContextManager[None]: ...

    def update(self, facts: StepFacts) -> AbstractContextManager[None]: ...

    def concluded(self, report: Outcome, *, skipped: int) -> None: ...

    @property
    def timed(self) -> TimedBatches | None:
        """Times the waits for the batches of a data loader; None where nobody asks for it."""
        ...

    def progress(self) -> list[str]:
        """What a line of progress says beside rate, norm and skipped steps."""
        ...

    def report(self, step: int, *, due: bool) -> None:
        """After each step: print what is to be printed then; `due` where a line of progress was."""
        ...

    def disk(self, what: Disk, left_out: Sequence[str] = ()) -> AbstractContextManager[None]:
        """Around a checkpoint that is saved or loaded; `left_out` names what of it is not loaded."""
        ...

    def close(self) -> None:
        """The engine ends: write what is left."""
        ...


class SilentMonitor:
    """The monitor of an engine whose config asks for none."""

    enabled = False

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Nothing."""

"""What `zeroshard explain` can find in a run: the causes that it knows by name, and what it says of each."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Cause(str, enum.Enum):
    """Why a run is slow or its numbers are odd. Those of `HARDWARE` are told only where nothing else explains it."""

    TOKENS = "more tokens"
    GARBAGE = "Python's garbage collector"
    DATA = "the data loader"
    SCRIPT = "the script, outside of the engine's calls"
    BLOCKED = "the program waits inside of a pass"
    PROCESSOR = "other programs take the processor"
    MEMORY = "the host's memory"
    DISK = "state on disk"
    LINK = "the link between ranks"
    SLOWER = "more work or a slower processor"
    SAVING = "saving checkpoints"
    NAN = "NaN in the gradients"
    OVERFLOW = "overflow of float16"
    RESUME = "the load of a checkpoint"
    SPIKE = "a spike of the gradient norm"
    LEAK = "growing host memory"

    def __str__(self) -> str:
        return self.value


HARDWARE = frozenset((Cause.LINK, Cause.DISK, Cause.SLOWER))


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a run.

    Attributes:
        rank: where it is so; None where it concerns all ranks alike.
        lost: seconds of the run that it took; 0.0 for odd numbers.
        text: a paragraph with the figures of this run.
    """

    cause: Cause
    text: str
    rank: int | None = None
    lost: float = 0.0


def ms(seconds: float) -> str:
    """Milliseconds, with two digits."""
    return f"{seconds * 1000:.2f} ms"


def step_numbers(steps: list[int], few: int = 10) -> str:
    """A few of the numbers."""
    return ", ".join(map(str, steps[:few])) + (" ..." if len(steps) > few else "")

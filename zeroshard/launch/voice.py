"""How an agent tells of what happens: to its user, to a launcher at the other end of its standard error, or to peers.

    died     a rank has failed or vanished: at once, perhaps without a cause yet
    cause    the report of the rank that failed first on this node, with its traceback
    clear    no rank of this node has failed that was not told of
    saving   a signal has come, and the ranks save; preempted: they have ended so
    stopping a signal has come; stopped: it has done its work
    ended    the agent is through: its exit status and what followed from the cause

The order in which a node learns things differs from that of another; who speaks first in public is decided by the
implementation: here the node itself (ToUser) or the launcher (ToLauncher), in line.py the nodes among them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Protocol

from zeroshard.launch import frames
from zeroshard.launch.runner import PREEMPTED

_ORPHAN_SECONDS = 0.3
SAVING = "zeroshard: {} received: the ranks finish their step, save and end; a second one ends them at once"
SAVED = f"zeroshard: the ranks were told to stop and have saved; status {PREEMPTED}"


class Voice(Protocol):
    """What the agent calls; `died` and `cause` come from the thread of the watch or from the main thread."""

    def ready(self) -> None:
        """Return when it can be heard; called before any rank is started."""
        ...

    def died(self, rank: int, violent: bool) -> None:
        """A rank has failed first on this node; `violent` if it was killed outright."""
        ...

    def cause(self, text: str) -> None:
        """Why: the headline, then lines of traceback."""
        ...

    def stopping(self, number: signal.Signals, clear: bool) -> None:
        """A signal tells the agent to end its ranks; `clear` if none of them had failed before."""
        ...

    def stopped(self, number: signal.Signals, failed: int | None) -> int:
        """They have ended; returns the exit status.

        Args:
            failed: exit status of the rank that had failed before the signal came; None where none had.
        """
        ...

    def may_save(self) -> bool:
        """Whether SIGTERM can be a request to save: not when it comes because of a failure elsewhere."""
        ...

    def saving(self, number: signal.Signals) -> None:
        """The ranks were asked to save and end."""
        ...

    def preempted(self) -> int:
        """They have; returns the exit status."""
        ...

    def ended(self, status: int, consequences: list[str]) -> int:
        """All ranks have ended; returns the exit status."""
        ...


class ToUser:
    """A node alone: everything is told at once."""

    def ready(self) -> None:
        pass

    def died(self, rank: int, violent: bool) -> None:
        pass  # the cause follows

    def cause(self, text: str) -> None:
        say(text)

    def stopping(self, number: signal.Signals, clear: bool) -> None:
        pass  # `stopped` tells it, when it is done

    def stopped(self, number: signal.Signals, failed: int | None) -> int:
        say(f"zeroshard: {number.name} received, all ranks ended")
        return 128 + number

    def may_save(self) -> bool:
        return True

    def saving(self, number: signal.Signals) -> None:
        say(SAVING.format(number.name))

    def preempted(self) -> int:
        say(SAVED)
        return PREEMPTED

    def ended(self, status: int, consequences: list[str]) -> int:
        if consequences:
            say("\n".join(consequences))
        return status


class ToLauncher:
    """A node of several that a launcher has started: it hears everything and speaks."""

    def __init__(self) -> None:
        self._guard = os.getppid()

    def ready(self) -> None:
        pass  # the launcher has heard a hello

    def died(self, rank: int, violent: bool) -> None:
        frames.send({"kind": "died", "rank": rank, "violent": violent})

    def cause(self, text: str) -> None:
        frames.send({"kind": "cause", "text": text})

    def stopping(self, number: signal.Signals, clear: bool) -> None:
        orphan = number is signal.SIGTERM and self._orphaned()
        frames.send({"kind": "stopping", "signal": number.name, "orphan": orphan})
        if clear:
            frames.send({"kind": "clear"})

    def _orphaned(self) -> bool:
        """Whether the guard is gone: the kernel sends SIGTERM when its thread that made us ends, the others follow."""
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while os.getppid() == self._guard and time.monotonic() < deadline:
            time.sleep(0.01)
        return os.getppid() != self._guard

    def stopped(self, number: signal.Signals, failed: int | None) -> int:
        # The launcher may have heard of what follows from our rank's failure first, and stopped us for it.
        frames.send({"kind": "clear"})
        return 128 + number if failed is None else failed

    def may_save(self) -> bool:
        return os.getppid() == self._guard

    def saving(self, number: signal.Signals) -> None:
        frames.send({"kind": "saving", "signal": number.name})
        frames.send({"kind": "clear"})

    def preempted(self) -> int:
        frames.send({"kind": "ended", "status": PREEMPTED, "lines": []})
        return PREEMPTED

    def ended(self, status: int, consequences: list[str]) -> int:
        frames.send({"kind": "ended", "status": status, "lines": consequences})
        return status


def say(text: str) -> None:
    """Write to standard error in one piece."""
    print(text, file=sys.stderr, flush=True)

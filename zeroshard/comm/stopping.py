"""One rank is asked to stop; all ranks stop after the same step.

    rank 0, boundary 41 --signal--> thread: "stop", at/0 = 41 --\\
    rank 1, boundary 42 <-- thread looks every half second:      >-- last = max(41, 42) + 1 = 43 on both
                            at/1 = 42 --------------------------/

After the request a thread of each rank publishes how many steps the rank has made, and the rank then waits at its next
boundary until it has read the numbers of all ranks. So no rank can be beyond the chosen step. Before a request a
boundary costs a counter, and the thread one store look-up each half second. Rejected: a flag in the step's all-reduce,
which on a GPU the host reads a step later, and which a loop without an optimizer does not have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from zeroshard.comm.board import ProcessIdentity
from zeroshard.comm.watchdog import Watchdog

_POLL_S = 0.5
_ANSWER_POLL_S = 0.02
_PATIENCE_S = 20.0
"""How long the threads of other ranks may take to say where their ranks are."""


class Stopping:
    """Where the ranks agree on their last step. All ranks make theirs in the same order.

    Args:
        store: through which the ranks met, None for one rank.
        wait: returns after so many seconds, or earlier when this rank was asked to stop; then True.
        on_failure: called in the thread when the ranks can't agree any more, with the reason. It may end the process.
        wake: makes `wait` return at once.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        world_size: int,
        watchdog: Watchdog,
        wait: Callable[[float], bool],
        on_failure: Callable[[str], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._size, self._watchdog = rank, world_size, watchdog
        self._wait, self._on_failure, self._wake = wait, on_failure, wake
        self._tells_at_end = True
        self._lock = threading.Lock()
        self._steps = 0
        self._published: int | None = None
        self._last: int | None = None
        self._decided, self._closing = threading.Event(), threading.Event()
        self._store: dist.Store | None = None
        if store is not None:
            generation = store.add(f"zeroshard/stopping/{rank}", 1)
            own: dist.Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (torch's stub lacks it)
            self._store = dist.PrefixStore(f"zeroshard/stopping/{generation}", own)
            me = ProcessIdentity.of_this_process()
            self._store.set(f"process/{rank}", f"{me.pid} {me.host}")
        self._thread = threading.Thread(target=self._run, name="zeroshard-stopping", daemon=True)
        self._thread.start()

    def boundary(self) -> bool:
        """A step is over; called by the main thread of all ranks after each step. Whether it was the last one."""
        with self._lock:
            self._steps += 1
            waits = self._published is not None
        if waits:
            self._decided.wait(2 * _PATIENCE_S)
            self._watchdog.raise_if_failed()
        return self._last is not None and self._steps >= self._last

    def close(self, *, patient: bool = True) -> None:
        """This rank makes no more steps; publish their number, in case another rank is asked to stop later.

        Args:
            patient: wait until the number is published; False if other ranks, and perhaps the store, are lost.
        """
        if not self._closing.is_set():
            self._tells_at_end = patient
            self._closing.set()
            self._wake()
            self._thread.join(None if patient else _POLL_S)

    def _run(self) -> None:
        try:
            self._await_request()
            if self._published is None and self._closing.is_set():
                if self._tells_at_end:
                    self._publish_steps()
                return
            self._agree()
        except RuntimeError as error:  # the store is gone with the process that held it
            if self._published is not None and not self._closing.is_set():
                self._on_failure(f"the ranks' store is gone ({str(error).splitlines()[0]})")
        finally:
            self._decided.set()

    def _await_request(self) -> None:
        while not self._closing.is_set():
            if self._wait(_POLL_S):
                if self._store is not None:
                    self._store.set("stop", str(self._rank))
                break
            if self._store is not None and self._store.check(["stop"]):
                break
        else:
            return
        self._publish_steps()

    def _publish_steps(self) -> None:
        with self._lock:
            steps = self._steps
            self._published = None if self._closing.is_set() else steps
        if self._store is not None:
            self._store.set(f"at/{self._rank}", str(steps))

    def _agree(self) -> None:
        if self._store is None:
            self._last = (self._published or 0) + 1
            return
        deadline = time.monotonic() + _PATIENCE_S
        missing = list(range(self._size))
        while missing:
            if self._closing.is_set() and not self._tells_at_end:
                return
            missing = [rank for rank in missing if not self._store.check([f"at/{rank}"])]
            if not missing:
                break
            gone = [rank for rank in missing if self._is_gone(rank)]
            if gone or time.monotonic() > deadline or self._watchdog.error is not None:
                why = "is gone" if gone else "did not answer"
                self._on_failure(f"rank {(gone or missing)[0]} {why}")
                return
            time.sleep(_ANSWER_POLL_S)
        steps = [int(self._store.get(f"at/{rank}")) for rank in range(self._size)]
        self._last = max(steps) + 1

    def _is_gone(self, rank: int) -> bool:
        assert self._store is not None
        if not self._store.check([f"process/{rank}"]):
            return False
        pid, _, host = self._store.get(f"process/{rank}").decode().partition(" ")
        return ProcessIdentity(host, int(pid)).is_dead_here()

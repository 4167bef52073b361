"""Ends a run whose ranks no longer fit together, within seconds and with the reason.

    main thread                          watchdog thread (one per rank, about one store look-up a second)
    with watchdog.waiting("all-gather    a wait longer than the patience: raise an alarm in the store
        of unit layers.3"):        ───>  an alarm: publish what this rank issued
        wait                             the alarm's judge: compare all logs, publish a verdict
    raise_if_failed()              <───  a verdict: hand the error to the main thread, else end the process

A collective can't tell a slow peer from one that will never come; the logs of both can. A rank whose log is a prefix of
ours is slow, and waiting goes on. The rejected alternative, a time limit on every collective, either kills slow but
healthy runs or lets a hung one burn for half an hour, and never says which unit it was.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Protocol

import torch.distributed as dist

from zeroshard.comm.board import Answer, Board, Verdict
from zeroshard.comm.divergence import explain_digests
from zeroshard.comm.inquiry import Inquiry, inquire
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.terminate import TerminateHook
from zeroshard.comm.user_collective import user_collective
from zeroshard.errors import DivergenceError, ZeroShardError

Timer = Callable[[str], AbstractContextManager[None]]
"""Makes a context around a wait, given the kind of its collective."""
EXIT_CODE = 70  # of a process whose main thread is blocked where no exception can reach it
_ALERT_POLL_S = 0.2
_ALERT_S = 20.0
_LINGER_S = 1.5
_ABORT_GRACE_S = 0.5
_REPORT_SLOW_S = 60.0

_LOGGER = logging.getLogger("zeroshard.comm")


class Outstanding(Protocol):
    """A collective that the device has not finished, for ranks whose host does not wait for it."""

    @property
    def description(self) -> str:
        """'all-gather of unit X'."""
        ...

    def is_completed(self) -> bool:
        """Whether it is done; asked from the watchdog thread."""
        ...


class _Waiting:
    """Marks the time in which the host waits; two attribute writes."""

    __slots__ = ("_description", "_watchdog")

    def __init__(self, watchdog: Watchdog, description: str) -> None:
        self._watchdog = watchdog
        self._description = description

    def __enter__(self) -> None:
        self._watchdog._mark = (self._description, time.monotonic())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._watchdog._mark = None


class Watchdog:
    """Watches the collectives of one log. All ranks build theirs in the same order, with the same `name`.

    `store` is the process group's (it is cloned for the thread), `rank` and `world_size` are those of the ranks that
    issue the logged operations. After `patience_s` seconds in one wait the logs are compared; `deadline_s` after its
    start a rank that gives no sign of life is declared unreachable. `on_divergence` is called in the watchdog thread
    with the error before the main thread gets it. If the main thread does not pick the error up within `exit_grace_s`
    (it is blocked in a device synchronisation, say) it is printed and the process ends with `EXIT_CODE`.
    At world size 1 nothing is started.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        world_size: int,
        log: OperationLog,
        *,
        name: str = "zeroshard",
        patience_s: float = 4.0,
        deadline_s: float = 10.0,
        poll_s: float = 1.0,
        exit_grace_s: float = 2.0,
        on_divergence: Callable[[ZeroShardError], None] | None = None,
    ) -> None:
        self.error: ZeroShardError | None = None
        self._rank, self._world_size, self._log = rank, world_size, log
        self._patience_s, self._deadline_s = patience_s, deadline_s
        self._poll_s, self._exit_grace_s = poll_s, exit_grace_s
        self._on_divergence = on_divergence
        self._mark: tuple[str, float] | None = None
        self._timer: Timer | None = None
        self._connection_lost = False
        self._probes: list[Callable[[], Outstanding | None]] = []
        self._at_interrupt: list[Callable[[], None]] = []
        self._outstanding: dict[int, tuple[Outstanding, float]] = {}
        self._alarm, self._mismatches = 0, 0
        self._in_user_collective: dict[int, str] = {}
        self._alert_until = self._heard_at = self._reported_at = 0.0
        self._stopping = threading.Event()
        self._wake, self._settled, self._picked_up = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._hook: TerminateHook | None = None
        if world_size > 1:
            assert store is not None, "more than one rank needs a store"
            # Ranks build their watchdogs in the same order, so the nth of a name finds the nth of its peers.
            generation = store.add(f"{name}/generation/{rank}", 1)
            self._store, self._prefix = store, f"{name}/{generation}"
            board = Board(store, self._prefix, rank)
            board.introduce()
            self._thread = threading.Thread(target=self._run, args=(board,), name="zeroshard-watchdog", daemon=True)
            self._thread.start()
            self._hook = TerminateHook(self._explain_abort)
            atexit.register(self.close)

    # The main thread's side.

    def waiting(self, description: str) -> AbstractContextManager[None]:
        """Context manager around a wait of the host for `description` ('all-gather of unit X')."""
        return _Waiting(self, description) if self._timer is None else self._timed(self._timer, description)

    @contextmanager
    def _timed(self, timer: Timer, description: str) -> Iterator[None]:
        with timer(description.partition(" of ")[0]), _Waiting(self, description):
            yield

    def time_waits(self, timer: Timer | None) -> None:
        """Hold `timer(kind)` around each wait of the host, with the kind of the collective ('all-gather')."""
        self._timer = timer

    def watch(self, probe: Callable[[], Outstanding | None]) -> None:
        """Also watch the last collective issued to a device, as `probe` returns it: the host may never wait for it."""
        self._probes.append(probe)

    def at_interrupt(self, call: Callable[[], None]) -> None:
        """Also call `call` in `interrupt`, after the error is set: it ends waits of the device."""
        self._at_interrupt.append(call)

    def raise_if_failed(self) -> None:
        """Raise the verdict, if one has been reached."""
        if self.error is not None:
            self._picked_up.set()
            raise type(self.error)(*self.error.args)

    def explain_failure(self, description: str, cause: BaseException) -> ZeroShardError:
        """The error to raise for a collective that failed with `cause`: who is gone, as well as it can be known."""
        if self._thread is not None and self.error is None:
            self._settled.clear()
            self._mark = (description, time.monotonic())
            self._connection_lost = True
            self._wake.set()
            self._settled.wait(self._deadline_s)
            self._mark, self._connection_lost = None, False
        self._picked_up.set()
        if self.error is not None:
            return type(self.error)(*self.error.args)
        return ZeroShardError(f"{description} failed on rank {self._rank} though no rank is known to be gone: {cause}")

    def explain_mismatch(self) -> None:
        """Called on every rank when digests differ: exchange the logs and raise DivergenceError naming the operation.

        Operations of equal size that were mixed complete without any sign, so results since then are wrong.
        """
        assert self._thread is not None, "one rank can't diverge from itself"
        self._mismatches += 1
        board = Board(self._store, self._prefix, self._rank)  # the thread's client is the thread's alone
        number = f"mismatch-{self._mismatches}"
        board.answer(number, Answer(self._log.tail(), None))
        deadline = time.monotonic() + self._deadline_s
        verdict = self._judge_mismatch(board, number, deadline) if self._rank == 0 else board.verdict()
        while verdict is None and time.monotonic() < deadline:
            time.sleep(0.05)
            verdict = board.verdict()
        if verdict is None:
            text = "ranks issued different collectives in the last step, and rank 0 did not say which in time"
            verdict = Verdict(text, True, 0)
        board.acknowledge()
        self._linger(board, verdict)
        self._picked_up.set()
        self.error = DivergenceError(verdict.text)
        raise DivergenceError(verdict.text)

    def announce(self, error: ZeroShardError) -> None:
        """Tell all ranks why this one can't go on: they raise a ZeroShardError with its text at a long wait."""
        first, self.error = self.error is None, self.error or error
        self._picked_up.set()
        if self._thread is not None and first:
            Board(self._store, self._prefix, self._rank).decide(Verdict(str(error), False, self._world_size - 1))

    def interrupt(self, error: ZeroShardError) -> None:
        """From another thread: waits of the main thread end in this error. The other ranks hear of it elsewhere."""
        self.error = self.error or error
        self._settled.set()
        self._wake.set()
        for call in self._at_interrupt:
            call()

    def close(self) -> None:
        """Stop the thread and tell the others that this rank issues nothing more. May be called twice."""
        atexit.unregister(self.close)
        thread, self._thread = self._thread, None
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()
        self._stopping.set()
        self._wake.set()
        if thread is not None:
            # After an error the store may be out of reach, and the thread waits in it.
            thread.join(self._deadline_s if self.error is None else _ABORT_GRACE_S)

    def _judge_mismatch(self, board: Board, number: str, deadline: float) -> Verdict:
        tails = {self._rank: self._log.tail()}
        while len(tails) < self._world_size and time.monotonic() < deadline - _LINGER_S:
            for rank in set(range(self._world_size)) - set(tails):
                answer = board.answer_of(number, rank)
                if answer is not None:
                    tails[rank] = answer.tail
            time.sleep(0.01)
        return board.decide(Verdict(explain_digests(tails), True, len(tails)))

    def _explain_abort(self) -> None:
        """Called in a thread of the communication backend that is about to abort the process."""
        if self._thread is None:
            return
        if self.error is None:
            if self._mark is None:
                self._mark = ("the collectives in flight", time.monotonic())
            self._connection_lost = True
            self._wake.set()
            self._settled.wait(self._deadline_s)
        if self.error is not None:
            print(f"rank {self._rank}: {type(self.error).__name__}: {self.error}", file=sys.stderr, flush=True)
            # The main thread may be about to raise the same; let it say where in the program that was.
            self._picked_up.wait(_ABORT_GRACE_S)
            time.sleep(_ABORT_GRACE_S)

    # The watchdog thread's side.

    def _run(self, board: Board) -> None:
        while not self._stopping.is_set() and self.error is None:
            alert = time.monotonic() < self._alert_until
            self._wake.wait(_ALERT_POLL_S if alert else self._poll_s)
            self._wake.clear()
            if self._stopping.is_set():
                break
            try:
                self._look(board)
            except RuntimeError as error:
                self._store_gone(error)
        try:
            board.leave(Answer(self._log.tail(), None))
        except RuntimeError as error:
            _LOGGER.debug("rank %d could not say that it left, the store is gone: %s", self._rank, error)

    def _look(self, board: Board) -> None:
        now = time.monotonic()
        while board.alarm_raised(self._alarm):
            mark = self._current_wait()
            place = user_collective() if mark is None else None
            board.answer(self._alarm, Answer(self._log.tail(), mark[0] if mark else None, place))
            self._alarm += 1
            self._alert_until = now + _ALERT_S
        wait = self._current_wait()
        impatient = wait is not None and now - max(wait[1], self._heard_at) > self._patience_s
        # Impatience too: a rank that has announced why it can't go on need not have raised an alarm.
        if now < self._alert_until or self._connection_lost or impatient:
            verdict = board.verdict()
            if verdict is not None:
                self._deliver(board, verdict)
                return
        if wait is None:
            return
        if (impatient or self._connection_lost) and board.raise_alarm(self._alarm):
            self._judge(board, *wait)

    def _judge(self, board: Board, description: str, since: float) -> None:
        number, self._alarm = self._alarm, self._alarm + 1
        inquiry = Inquiry(board, number, self._rank, self._world_size, description, self._log.tail())
        inquiry.before = self._in_user_collective
        lost = self._connection_lost
        last_moment = max(since + self._deadline_s - 2 * _LINGER_S, time.monotonic() + 2.0)

        def patient() -> bool:
            over = lost and bool(inquiry.dead or inquiry.left)  # the cause is known: the silent need not be awaited
            return not over and time.monotonic() < last_moment and not self._stopping.wait(_ALERT_POLL_S)

        verdict = inquire(inquiry, patient=patient, connection_lost=lost)
        self._in_user_collective = inquiry.in_user_collective()
        self._heard_at = time.monotonic()
        if not self._still_waits(description, since):
            return
        if verdict is not None:
            self._deliver(board, board.decide(verdict))
            return
        if lost:
            self._settled.set()
        waited = self._heard_at - since
        if waited > _REPORT_SLOW_S and self._reported_at < since:
            self._reported_at = self._heard_at
            _LOGGER.warning("rank %d waits %.0f s for %s: %s", self._rank, waited, description, inquiry.slow())

    def _current_wait(self) -> tuple[str, float] | None:
        """What the host waits for, else the oldest device collective that has not moved since it was first seen."""
        mark = self._mark
        if mark is not None:
            return mark
        now, oldest = time.monotonic(), None
        for place, probe in enumerate(self._probes):
            last = probe()
            if last is None or last.is_completed():
                self._outstanding.pop(place, None)
                continue
            seen = self._outstanding.get(place)
            if seen is None or seen[0] is not last:
                seen = self._outstanding[place] = (last, now)
            if oldest is None or seen[1] < oldest[1]:
                oldest = (last.description, seen[1])
        return oldest

    def _still_waits(self, description: str, since: float) -> bool:
        return not self._stopping.is_set() and self._current_wait() == (description, since)

    def _deliver(self, board: Board, verdict: Verdict) -> None:
        board.acknowledge()
        self._linger(board, verdict)
        self._fail(DivergenceError(verdict.text) if verdict.diverged else ZeroShardError(verdict.text))

    def _linger(self, board: Board, verdict: Verdict) -> None:
        """Wait a moment until all have read the verdict: this process may host the store, and is about to end."""
        end = time.monotonic() + _LINGER_S
        while board.acknowledged() < verdict.readers and time.monotonic() < end:
            time.sleep(0.05)

    def _store_gone(self, cause: RuntimeError) -> None:
        wait = self._current_wait()
        if self._stopping.is_set() or wait is None:
            return  # nobody waits; at the end of a run its host may leave first
        if self._connection_lost or time.monotonic() - wait[1] > self._patience_s:
            self._fail(
                ZeroShardError(
                    f"the store that ranks meet in is gone while rank {self._rank} waited for {wait[0]}: rank 0 or "
                    f"the launcher, which hosts it, has died. Its own output says why. ({str(cause).splitlines()[0]})"
                )
            )

    def _fail(self, error: ZeroShardError) -> None:
        if self._on_divergence is not None:
            self._on_divergence(error)
        self.error = error
        self._settled.set()
        end = time.monotonic() + self._exit_grace_s
        while not self._picked_up.wait(0.05):
            if self._stopping.is_set():
                return
            if time.monotonic() > end:
                print(f"rank {self._rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(EXIT_CODE)

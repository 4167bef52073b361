"""The guard: a process that waits for the node's agent, and ends all processes that remain when the agent has ended.

    guard (forks before torch is loaded) --> agent --> rank 0 --> its data loader workers
      ^ signals, or the launcher's input         \\--> rank 1

| killed | what ends the other processes |
|---|---|
| a rank | the agent |
| the agent | the kernel ends the ranks, the guard all that the ranks have started |
| the guard | the kernel signals the agent, which ends the ranks and all that they have started |

Processes that ranks have started are recognized by an inherited variable, and by the guard also as its own children,
since it adopts orphans. Process groups were rejected: a process that starts a session leaves its group. After a job
that ends well processes are not ended, since a script may have started them on purpose.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from zeroshard.errors import ZeroShardError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_AWAITED = (*FORWARDED, signal.SIGCHLD)
_JOB_VARIABLE = "ZEROSHARD_JOB"
# Seconds that remaining processes may take to end after SIGTERM; the guard waits as long again after SIGKILL.
_REMAINING_SECONDS = 2.0

Work = Callable[[str], int]
SendSignal = Callable[[signal.Signals], None]
Control = Callable[[SendSignal, str], None]


def run_guarded(work: Work, killed: SendSignal, control: Control | None = None) -> int:
    """Run `work` in a child process; returns its exit status when no process of the node is left.

    The child gets the signals that this process gets.

    Args:
        work: called with a temporary directory; returns the exit status.
        killed: called with the signal, if one ended the child.
        control: called in a thread of its own, with a function that sends the child a signal, and the directory.
    """
    _fill_missing_streams()
    _flush()
    job = uuid.uuid4().hex
    os.environ[_JOB_VARIABLE] = job
    with tempfile.TemporaryDirectory(prefix="zeroshard-", dir=_short_directory()) as directory:
        _adopt_orphans()
        parent = os.getpid()
        # The guard blocks signals and receives them where it waits. A handler for a signal that comes during the fork,
        # or just before the wait, would run too late: after the child has ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        child = os.fork()
        if child == 0:
            os._exit(_in_child(work, directory, parent, job))
        return _wait(
            child, killed, job, None if control is None else lambda send_signal: control(send_signal, directory)
        )


def _in_child(work: Work, directory: str, parent: int, job: str) -> int:
    # Ctrl-C at a terminal goes to the foreground group: only to the guard, which forwards it once.
    os.setpgid(0, 0)
    # Until ranks are started, a signal ends this process: a handler would not run during C code, and an exception
    # during an import could be turned into another one.
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return 128 + signal.SIGTERM
    status = 1
    try:
        status = work(directory)
    except ZeroShardError as error:
        print(f"zeroshard: {error}", file=sys.stderr)
        status = 2
    except BaseException:
        traceback.print_exc()  # an error in zeroshard: this process must not continue with the guard's code
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)  # the process ends within seconds, and torch's handler would raise
    if status != 0:
        _end_remaining(job)
    _flush()
    return status


def _wait(child: int, killed: SendSignal, job: str, control: Callable[[SendSignal], None] | None) -> int:
    def send_signal(number: signal.Signals) -> None:
        with reaping:  # after the child is reaped its id might be that of another process
            if not ended:
                os.kill(child, number)

    ended: list[int] = []
    reaping = threading.Lock()
    if control is not None:
        threading.Thread(target=control, args=(send_signal,), daemon=True).start()
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        number = signal.sigwait(_AWAITED)
        if number == signal.SIGCHLD:
            _reap_others(child)
        else:
            send_signal(signal.Signals(number))
    with reaping:
        ended.append(child)
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        killed(signal.Signals(-code))
    if code != 0:
        _end_remaining(job)
    return code if code >= 0 else 128 - code


def _reap_others(child: int) -> None:
    """Reap adopted orphans that have ended."""
    for pid, parent, _ in _processes():
        if parent == os.getpid() and pid != child:
            os.waitpid(pid, os.WNOHANG)


def _end_remaining(job: str) -> None:
    """End the processes that ranks have started: with SIGTERM, and after some time with SIGKILL."""
    begun = time.monotonic()
    told: set[int] = set()
    while pids := _remaining_processes(job):
        late = time.monotonic() - begun > _REMAINING_SECONDS
        for pid in pids if late else pids - told:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        told |= pids
        if time.monotonic() - begun > 2 * _REMAINING_SECONDS:
            return  # a process in a system call of a device that does not answer does not react to SIGKILL
        time.sleep(0.02)


def _remaining_processes(job: str) -> set[int]:
    """Running processes that are children of this process or have inherited the job's variable."""
    found: set[int] = set()
    mark = f"{_JOB_VARIABLE}={job}".encode()
    for pid, parent, state in _processes():
        if state == "Z":
            if parent == os.getpid():
                os.waitpid(pid, os.WNOHANG)
            continue
        try:
            ours = parent == os.getpid() or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile, or is another user's
        if ours:
            found.add(pid)
    return found


def _processes() -> Iterator[tuple[int, int, str]]:
    """Process id, parent and state of every process."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which is in parentheses and may hold anything: state, parent.
            state, parent, *_ = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        yield int(status.parent.name), int(parent), state


def _fill_missing_streams() -> None:
    """Open /dev/null for standard streams that are closed (`>&-`); else ranks would print into the next open file."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _short_directory() -> str:
    """A directory for the socket, whose path may have about 100 characters; TMPDIR on a cluster can be longer."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 64 else "/tmp"

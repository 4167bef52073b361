"""The process that stays when everything else of a node goes: it waits for the agent and leaves nothing behind it.

    guard (forked before torch is there) --> agent --> rank 0 --> its data loader workers
      ^ signals, or the launcher's input         \\--> rank 1

| killed | who ends the others |
|---|---|
| a rank | the agent |
| the agent | the kernel ends the ranks, the guard whatever they had started |
| the guard | the kernel tells the agent, which ends the ranks and whatever they had started |

What they had started is known by a variable that it inherits, and to the guard as its own children, which orphans
become. Process groups were rejected: a process that makes a session of its own has left them. A job that ends well may
leave a process behind on purpose.
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
# How long what is left may take to end by itself; as long again, it is waited for after SIGKILL.
_LEFT_SECONDS = 2.0

Work = Callable[[str], int]
Tell = Callable[[signal.Signals], None]
Control = Callable[[Tell, str], None]


def guarded(work: Work, killed: Tell, control: Control | None = None) -> int:
    """Run `work(directory)` in a child; its exit status, when no process of the node is left.

    `directory` is temporary. The child gets the signals that this process gets; `control`, which runs in a thread of
    its own, may send it others; it gets the directory too. `killed` is told if a signal ended the child.
    """
    _fill_missing_streams()
    _flush()
    job = uuid.uuid4().hex
    os.environ[_JOB_VARIABLE] = job
    with tempfile.TemporaryDirectory(prefix="zeroshard-", dir=_short_directory()) as directory:
        _adopt_orphans()
        parent = os.getpid()
        # The guard takes signals one by one where it waits for them, so that none comes amid the fork or just before
        # it waits, where a handler would run too late: when the child has ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        child = os.fork()
        if child == 0:
            os._exit(_in_child(work, directory, parent, job))
        return _wait(child, killed, job, None if control is None else lambda tell: control(tell, directory))


def _in_child(work: Work, directory: str, parent: int, job: str) -> int:
    # Ctrl-C at a terminal goes to its foreground group: to the guard alone, which passes it on once.
    os.setpgid(0, 0)
    # Until ranks are started, a signal ends this process, whatever it is doing: handlers would not run amid C code, and
    # an exception amid an import comes out as whatever the import makes of it.
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
        traceback.print_exc()  # a fault of ours: it must not run on into the guard's code
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)  # it ends within seconds anyway, and a handler of torch's would raise
    if status != 0:
        _end_what_is_left(job)
    _flush()
    return status


def _wait(child: int, killed: Tell, job: str, control: Callable[[Tell], None] | None) -> int:
    def tell(number: signal.Signals) -> None:
        with reaping:  # else the number might be another process's by now
            if not ended:
                os.kill(child, number)

    ended: list[int] = []
    reaping = threading.Lock()
    if control is not None:
        threading.Thread(target=control, args=(tell,), daemon=True).start()
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        number = signal.sigwait(_AWAITED)
        if number == signal.SIGCHLD:
            _reap_others(child)
        else:
            tell(signal.Signals(number))
    with reaping:
        ended.append(child)
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        killed(signal.Signals(-code))
    if code != 0:
        _end_what_is_left(job)
    return code if code >= 0 else 128 - code


def _reap_others(child: int) -> None:
    """Take the status of orphans that have ended."""
    for pid in _children(os.getpid()):
        if pid != child:
            os.waitpid(pid, os.WNOHANG)


def _end_what_is_left(job: str) -> None:
    """End the processes that ranks have left: with time to do it themselves, then outright."""
    begun = time.monotonic()
    told: set[int] = set()
    while pids := _left(job):
        late = time.monotonic() - begun > _LEFT_SECONDS
        for pid in pids if late else pids - told:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        told |= pids
        if time.monotonic() - begun > 2 * _LEFT_SECONDS:
            return  # in the kernel, on a device that does not answer: SIGKILL waits there
        time.sleep(0.02)


def _left(job: str) -> set[int]:
    """What runs and is a child of this process or has inherited the job's variable."""
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


def _children(parent: int) -> list[int]:
    return [pid for pid, theirs, _ in _processes() if theirs == parent]


def _processes() -> Iterator[tuple[int, int, str]]:
    """Number, parent and state of every process."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which is in parentheses and may hold anything: state, parent.
            state, parent, *_ = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        yield int(status.parent.name), int(parent), state


def _fill_missing_streams() -> None:
    """Of a launcher that was started without (`>&-`); else the ranks would print into whatever is opened next."""
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
    """Where the socket goes: its path may have about 100 characters, which the TMPDIR of a cluster can exceed."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 64 else "/tmp"

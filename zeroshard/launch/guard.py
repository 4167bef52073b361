"""The process that stays when everything else of a node goes: it waits for the agent and leaves nothing behind it.

    guard (forked before torch is there) --> agent --> rank 0 --> its data loader workers
      ^ signals, or the launcher's input         \\--> rank 1

| killed | who ends the others |
|---|---|
| a rank | the agent |
| the agent | the kernel ends the ranks, the guard whatever they had started: orphans become its children |
| the guard | the kernel tells the agent, which ends the ranks and their process groups |

A watch by process groups alone was rejected: a process that makes a session of its own leaves the group, and with the
agent nobody would be left to end it.
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
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from zeroshard.errors import ZeroShardError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The ranks of an agent that was killed have got SIGTERM from the kernel: how long they may take.
_ORPHAN_SECONDS = 2.0

Work = Callable[[str], int]
Control = Callable[[Callable[[signal.Signals], None]], None]


def guarded(work: Work, killed: Callable[[signal.Signals], None], control: Control | None = None) -> int:
    """Run `work(directory)` in a child; its exit status, when no process of the node is left.

    `directory` is temporary. The child gets the signals that this process gets; `control`, which runs in a thread of
    its own, may send it others. `killed` is told if a signal ended the child.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="zeroshard-", dir=_short_directory()) as directory:
        _adopt_orphans()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            os._exit(_in_child(work, directory, parent))
        return _wait(child, killed, control)


def _in_child(work: Work, directory: str, parent: int) -> int:
    # Ctrl-C at a terminal goes to its foreground group: to the guard alone, which passes it on once.
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return 128 + signal.SIGTERM
    try:
        return work(directory)
    except ZeroShardError as error:
        print(f"zeroshard: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()  # a fault of ours: it must not run on into the guard's code
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _wait(child: int, killed: Callable[[signal.Signals], None], control: Control | None) -> int:
    def tell(number: signal.Signals) -> None:
        with reaping:  # else the number might be another process's by now
            if not ended:
                os.kill(child, number)

    def forward(number: int, frame: FrameType | None) -> None:
        tell(signal.Signals(number))

    ended: list[int] = []
    reaping = threading.RLock()  # a handler may run while this thread holds it
    for number in _FORWARDED:
        signal.signal(number, forward)
    if control is not None:
        threading.Thread(target=control, args=(tell,), daemon=True).start()
    while True:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        info = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is not None:
            break
        _reap_others(child)
    with reaping:
        ended.append(child)
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    _end_descendants()
    killed(signal.Signals(-code))
    return 128 - code


def _reap_others(child: int) -> None:
    """Take the status of orphans that have ended, so that they are not the ones that the next wait finds."""
    for pid in _children(os.getpid()):
        if pid != child:
            os.waitpid(pid, os.WNOHANG)


def _end_descendants() -> None:
    """End all that the child left: with time for those that the kernel has told, then outright."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while pids := _living_children():
        if time.monotonic() > deadline:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _living_children() -> list[int]:
    """Children of this process that have not ended; those of a child that ends become ours."""
    living: list[int] = []
    for pid in _children(os.getpid()):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            living.append(pid)
    return living


def _children(parent: int) -> list[int]:
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which is in parentheses and may hold anything: state, parent.
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == parent:
            found.append(int(status.parent.name))
    return found


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _short_directory() -> str:
    """Where the socket goes: its path may have about 100 characters, which the TMPDIR of a cluster can exceed."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 64 else "/tmp"

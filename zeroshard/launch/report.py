"""The launcher's report of a failure: the rank that failed first, its traceback, then one line for each other rank.

torch's own summary has the first failure last, below the others, and no traceback of a script without its decorator.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from zeroshard.launch.failures import RankProcess
from zeroshard.launch.hints import hint
from zeroshard.launch.runner import FATAL_STACKS

_HINTS = {
    signal.SIGKILL: "nobody in the job sends it: most often the kernel did, out of memory (see dmesg)",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up: its message is in the output above",
    signal.SIGBUS: "often a full /dev/shm or a truncated memory-mapped file",
}


def first_failure(process: RankProcess, status: int, host: str) -> str:
    """The report of the rank that failed first: its traceback, or the signal or exit code if it wrote no error file.

    Below it stands what the error means, where `zeroshard.launch.hints` knows more than its text.

    Args:
        status: its exit code, negative for a signal.
    """
    where = f"local rank {process.local_rank}, host {host}, pid {process.pid}"
    where += f", restart {process.restart}" if process.restart else ""
    recorded = _recorded(process.error_file)
    summary, stack = recorded or (_cause(status), _fatal_stacks(process.error_file))
    report = f"zeroshard: rank {process.rank} ({where}) failed first: {summary}\n{stack}".rstrip()
    meaning = hint(summary, stack)
    return report if meaning is None else f"{report}\nzeroshard: {meaning}"


def consequences(others: Mapping[int, ProcessFailure]) -> list[str]:
    """A line for each rank that failed after the first, and one line for all ranks that were ended."""
    lines: list[str] = []
    stopped = 0
    for rank, other in sorted(others.items()):
        recorded = _recorded(other.error_file)
        if recorded is not None:
            lines.append(f"zeroshard: then rank {rank}: {one_line(recorded[0])}")
        elif other.exitcode in (-signal.SIGTERM, -signal.SIGKILL):
            stopped += 1
        else:
            lines.append(f"zeroshard: then rank {rank}: {_cause(other.exitcode)}")
    if stopped:
        lines.append(f"zeroshard: ended {stopped} other rank{'s' if stopped > 1 else ''}")
    return lines


def exit_status(code: int) -> int:
    """The launcher's exit status for a rank's: for a signal 128 plus its number, as in shells."""
    return code if code > 0 else 128 - code


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}, without a traceback (os._exit, or an error while Python shut down)"
    number = signal.Signals(-code)
    hint = f" ({_HINTS[number]})" if number in _HINTS else ""
    return f"killed by signal {number.name}{hint}"


def _recorded(error_file: str) -> tuple[str, str] | None:
    """Summary and traceback from a rank's error file; the user's error handler may have written a plain string."""
    if not os.path.exists(error_file):
        return None
    message = json.loads(Path(error_file).read_text())["message"]
    if isinstance(message, str):
        return message, ""
    return message["message"], message["extraInfo"]["py_callstack"].rstrip()


def _fatal_stacks(error_file: str) -> str:
    """The Python stacks at a crash of native code, which faulthandler wrote; "" if there are none."""
    stacks = Path(error_file).with_name(FATAL_STACKS)
    return stacks.read_text() if stacks.exists() else ""


def one_line(text: str) -> str:
    first, *rest = text.splitlines() or [""]
    return f"{first} [...]" if rest else first

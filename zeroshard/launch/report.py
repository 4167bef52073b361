"""The words in which the launcher tells of a dead rank: the cause first, its traceback, then the others in a line each.

Torch's own summary puts the first failure last, below the others, and shows no traceback for undecorated scripts.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroshard.launch.runner import FATAL_STACKS
from zeroshard.launch.watch import Death, RankProcess

_HINTS = {
    signal.SIGKILL: "nobody in the job sends it: most often the kernel did, out of memory (see dmesg)",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up: its message is in the output above",
    signal.SIGBUS: "often a full /dev/shm or a truncated memory-mapped file",
}


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended, as the agent saw it; `code` is negative for a signal."""

    process: RankProcess
    code: int


def announcement(death: Death, host: str) -> str:
    """The report at the moment of death: with the traceback if the rank recorded one, else what is known by then."""
    who = _who(death.process, host)
    if death.recorded:
        summary, stack = _recorded(death.process)
        return f"zeroshard: {who} failed first: {summary}\n{stack}".rstrip()
    if death.signal is not None:
        return cause(Exit(death.process, -death.signal), host)
    return f"zeroshard: {who} died first, without a traceback; ending the other ranks"


def cause(first: Exit, host: str) -> str:
    """The report of the rank that failed first when it has ended: with the signal or exit code if it left no error."""
    if Path(first.process.error_file).exists():
        return announcement(Death(first.process, recorded=True), host)
    headline = f"zeroshard: {_who(first.process, host)} failed first: {_cause(first.code)}"
    return "\n".join([headline, *_fatal_stacks(first.process)])


def consequences(others: Mapping[int, Exit]) -> list[str]:
    """A line for each rank that failed after the first, and one for those that were ended."""
    lines: list[str] = []
    stopped = 0
    for rank, other in sorted(others.items()):
        if Path(other.process.error_file).exists():
            lines.append(f"zeroshard: then rank {rank}: {one_line(_recorded(other.process)[0])}")
        elif other.code in (-signal.SIGTERM, -signal.SIGKILL):
            stopped += 1
        else:
            lines.append(f"zeroshard: then rank {rank}: {_cause(other.code)}")
    if stopped:
        lines.append(f"zeroshard: ended {stopped} other rank{'s' if stopped > 1 else ''}")
    return lines


def exit_status(code: int) -> int:
    """The launcher's own exit status: the rank's, in the shell's manner for signals."""
    return code if code > 0 else 128 - code


def _who(process: RankProcess, host: str) -> str:
    attempt = f", restart {process.attempt}" if process.attempt else ""
    return f"rank {process.rank} (local rank {process.local_rank}, host {host}, pid {process.pid}{attempt})"


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}, without a traceback (os._exit, or an error while Python shut down)"
    number = signal.Signals(-code)
    hint = f" ({_HINTS[number]})" if number in _HINTS else ""
    return f"killed by signal {number.name}{hint}"


def _recorded(process: RankProcess) -> tuple[str, str]:
    """Summary and traceback from the rank's error file; a plain string there is from a handler of the user's."""
    message = json.loads(Path(process.error_file).read_text())["message"]
    if isinstance(message, str):
        return message, ""
    return message["message"], message["extraInfo"]["py_callstack"].rstrip()


def _fatal_stacks(process: RankProcess) -> list[str]:
    stacks = Path(process.error_file).with_name(FATAL_STACKS)
    text = stacks.read_text().rstrip() if stacks.exists() else ""
    return [text] if text else []


def one_line(text: str) -> str:
    first, *rest = text.splitlines() or [""]
    return f"{first} [...]" if rest else first

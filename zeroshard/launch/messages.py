"""Messages of a node: text for the user, or JSON on standard error for the launcher at the other end of an ssh.

    "step 3" MARK {"kind": "left", "status": 0} "\\n"      one write, so that the kernel does not mix it with others

Ranks and node share the stream, so a message may follow text that has no newline yet. Rejected: a second connection;
clusters allow connections to nodes, but often not from them, and a listening launcher would need a secret.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

from zeroshard.launch.runner import PREEMPTED

SAVING = "zeroshard: SIGTERM received: the ranks finish their step, save and end; a second one ends them at once"
SAVED = f"zeroshard: the ranks were told to stop and have saved; status {PREEMPTED}"
Message = dict[str, Any]
_MARK = "\x1e\x02zeroshard "


def say(text: str) -> None:
    """Write a line to standard error in one write; an unbuffered stream would get the newline as a second one."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def send(**message: Any) -> None:
    """Send the launcher a message. No error if it has ended: the end of this node's input shows that."""
    with suppress(OSError):
        os.write(2, f"{_MARK}{json.dumps(message)}\n".encode())


def split_message(line: bytes) -> tuple[bytes, Message | None]:
    """The text of a line, and the message after it; None if there is no message."""
    text, mark, message = line.partition(_MARK.encode())
    return (text, json.loads(message)) if mark else (line, None)

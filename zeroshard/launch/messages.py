"""What a process of the launcher says: to its user, or on standard error to the launcher at the other end of an ssh.

    "step 3" MARK {"kind": "left", "status": 0} "\\n"      one write, which the kernel mixes with no other

Ranks and launcher share the stream, so a message may follow text that has no newline yet. A connection of its own was
rejected: clusters let the launcher in, not out, and a listener needs a secret.
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
    """Write to standard error in one piece; an unbuffered stream would get the end of the line as a second one."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def send(**message: Any) -> None:
    """Tell the launcher; one that is gone is no error here, since the end of this node's input tells of that."""
    with suppress(OSError):
        os.write(2, f"{_MARK}{json.dumps(message)}\n".encode())


def split_message(line: bytes) -> tuple[bytes, Message | None]:
    """The text of a line, and the message that follows it."""
    text, mark, message = line.partition(_MARK.encode())
    return (text, json.loads(message)) if mark else (line, None)

"""Messages of a node to its launcher, within the stream of its standard error.

    b"step 3\\n"  ESC-like mark | writer | last? | JSON chunk | end mark "\\n"   b"step 4\\n"

Ranks, agent and guard of a node share one stream. Each frame is a single write of less than PIPE_BUF bytes, which the
kernel never mixes with another; a longer message is several frames, put together again by its writer's number. The
JSON is ASCII, so neither mark occurs in it.

A connection back to the launcher was rejected: clusters let the launcher in, not out, and a listener needs a secret.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

_START = b"\x1e\x02zeroshard "
_END = b"\x03\x1e\n"
_CHUNK = 3000

Message = dict[str, Any]


def send(message: Message, descriptor: int = 2) -> None:
    """Write the message; a launcher that is gone is no error here, since the end of the node's input tells of that."""
    text = json.dumps(message).encode("ascii")
    chunks = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    for number, chunk in enumerate(chunks):
        last = b"1" if number == len(chunks) - 1 else b"0"
        try:
            os.write(descriptor, _START + b"%d %s " % (os.getpid(), last) + chunk + _END)
        except OSError:
            return


@dataclass
class Decoder:
    """Takes the stream apart into what is to be shown and the messages."""

    _held: bytes = b""
    _parts: dict[bytes, bytes] = field(default_factory=dict)

    def feed(self, data: bytes) -> tuple[bytes, list[Message]]:
        """The plain bytes and the messages that are complete by now."""
        self._held += data
        plain = b""
        messages: list[Message] = []
        while True:
            before, mark, rest = self._held.partition(_START)
            if not mark:
                keep = _overlap(self._held)
                plain += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                return plain, messages
            frame, end, after = rest.partition(_END)
            plain += before
            if not end:
                self._held = _START + rest
                return plain, messages
            self._held = after
            writer, last, chunk = frame.split(b" ", 2)
            text = self._parts.pop(writer, b"") + chunk
            if last == b"1":
                messages.append(json.loads(text))
            else:
                self._parts[writer] = text

    def rest(self) -> bytes:
        """What is left at the end of the stream: the beginning of a frame that never came."""
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes) -> int:
    """How many bytes at the end may be the beginning of a mark."""
    return next((size for size in range(min(len(_START) - 1, len(data)), 0, -1) if data.endswith(_START[:size])), 0)

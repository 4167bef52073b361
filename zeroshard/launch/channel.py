"""A pair of pipes to a node: text lines in, output with frames out, each line of output under the host's name.

launcher --write()--> stdin [ssh] stdout, stderr --read()--> "host: line" on our own stdout, stderr; messages
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from zeroshard.launch.frames import Decoder, Message


@dataclass(frozen=True)
class Pipes:
    """Our ends of a node's streams; unbuffered."""

    input: IO[bytes]
    output: IO[bytes]
    errors: IO[bytes]


# A line that does not end (a progress bar) is shown when it is so long.
_LONGEST = 65536
_KEPT_WORDS = 400


class Channel:
    """The ssh of one host. Nothing here blocks for long: the launcher's loop calls it when there is something."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], pipes: Pipes, variables: str) -> None:
        self._name = name
        self._process = process
        self._shared = process.stdin is None  # a pdsh: one process for all hosts
        self._gone_at: float | None = None
        self._input = pipes.input
        self._open = {stream.fileno(): stream for stream in (pipes.output, pipes.errors)}
        self._errors = pipes.errors.fileno()
        self._decoder = Decoder()
        self._partial = dict.fromkeys(self._open, b"")
        self._words = b""
        # Until the node has answered, what comes is of ssh and of the host's login files: kept for an error only.
        self.shown = False
        self.write(variables)

    def streams(self) -> Iterator[int]:
        """Descriptors to wait on."""
        yield from list(self._open)

    def write(self, line: str) -> None:
        """Send a line; a node that is gone is noticed by the end of its output."""
        if not self._input.closed:
            with suppress(OSError):
                self._input.write(line.encode() + b"\n")

    def close_input(self) -> None:
        """Tell the node that nothing more will come."""
        with suppress(OSError):
            self._input.close()

    def read(self, descriptor: int) -> tuple[list[Message], bool]:
        """Show what has come; the messages within it, and False at the end of the stream."""
        data = os.read(descriptor, 65536)
        messages: list[Message] = []
        if descriptor == self._errors:
            plain, messages = self._decoder.feed(data) if data else (self._decoder.rest(), [])
            self._words = (self._words + plain)[-_KEPT_WORDS:]
        else:
            plain = data
        self._show(descriptor, plain, final=not data)
        return messages, bool(data)

    def close_stream(self, descriptor: int) -> None:
        """Its end has been read."""
        self._open.pop(descriptor).close()

    def ended(self) -> int | None:
        """A status when the node's ssh has ended and its output has been read; 0 where pdsh keeps the status."""
        code = self._process.poll()
        if not self._open:
            return 0 if code is None and self._shared else code
        if code is None:
            return None
        # Output of a process that has ended is still to be read; but a fifo that no ssh opened has no end.
        self._gone_at = self._gone_at or time.monotonic()
        return code if self._shared and time.monotonic() - self._gone_at > 1.0 else None

    def kill(self) -> None:
        """End the process and what it started (a proxy command; under pdsh the ssh's of all hosts)."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The last line on standard error: of the ssh itself, or of the shell on the host."""
        lines = self._words.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _show(self, descriptor: int, data: bytes, final: bool) -> None:
        text = self._partial[descriptor] + data
        end = len(text) if final or len(text) > _LONGEST else max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        whole, self._partial[descriptor] = text[:end], text[end:]
        if not whole or not self.shown:
            return
        prefix = self._name.encode() + b": "
        shown = b"".join(prefix + line for line in whole.splitlines(keepends=True))
        stream = sys.stderr if descriptor == self._errors else sys.stdout
        stream.buffer.write(shown if shown.endswith((b"\n", b"\r")) else shown + b"\n")
        stream.flush()

"""A pair of pipes to a node: text lines in, output with frames out, each line of output under the host's name.

launcher --write()--> stdin [ssh] stdout, stderr --read()--> "host: line" on our own stdout, stderr; messages
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import IO

from zeroshard.launch.frames import Decoder, Message

# A line that does not end (a progress bar) is shown when it is so long.
_LONGEST = 65536
_KEPT_WORDS = 400


class Channel:
    """The ssh of one host. Nothing here blocks for long: the launcher's loop calls it when there is something."""

    def __init__(self, name: str, command: list[str], variables: str, environ: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            # Ctrl-C at the terminal is for the launcher, which tells the nodes.
            start_new_session=True,
        )
        out, err = self._process.stdout, self._process.stderr
        assert out is not None
        assert err is not None
        self._open: dict[int, IO[bytes]] = {out.fileno(): out, err.fileno(): err}
        self._errors = err.fileno()
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
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return
        with suppress(OSError):
            pipe.write(line.encode() + b"\n")
            pipe.flush()

    def close_input(self) -> None:
        """Tell the node that nothing more will come."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

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
        """The exit status when the process has ended and its output has been read."""
        return None if self._open else self._process.poll()

    def kill(self) -> None:
        """End the process and its helpers (a proxy command), and do not wait for its output."""
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

"""The pipes to a node's ssh: lines of text go in; output and messages come out, each line after the host's name.

launcher --write()--> stdin [ssh] stdout, stderr --read()--> "host: line" on our own stdout, stderr; messages
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroshard.launch.hosts import Host
from zeroshard.launch.messages import Message, split_message
from zeroshard.launch.starters import StarterOptions, ssh_command

# A line without end (a progress bar) is shown when it has so many bytes.
_LONGEST = 65536


class Channel:
    """The ssh of one host. Nothing here blocks for long: the launcher's loop calls `read` when there is output.

    Args:
        variables: environment variables, which are sent as the first line.
    """

    def __init__(self, host: str, starter: StarterOptions, variables: Mapping[str, str]) -> None:
        self._host = host
        self._process = subprocess.Popen(
            ssh_command(host, starter, Path.cwd()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # Ctrl-C at the terminal is for the launcher, which tells the nodes.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._errors = self._process.stderr.fileno()
        self._open = {stream.fileno(): stream for stream in (self._process.stdout, self._process.stderr)}
        self._partial = dict.fromkeys(self._open, b"")
        # Output before the node's first message is from ssh and the host's login files; the last line is for an error.
        self.answered = False
        self.last_line = ""
        self.write(json.dumps(variables))

    def streams(self) -> list[int]:
        """The descriptors of output and errors, to wait for."""
        return list(self._open)

    def write(self, line: str) -> None:
        """Send a line. No error if the node is gone: the end of its output shows that."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(line.encode() + b"\n")

    def close_input(self) -> None:
        """Tell the node that nothing more will come."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def read(self, descriptor: int) -> tuple[list[Message], bool]:
        """Show new output; returns the messages in it, and False at the end of the stream, which is then closed."""
        data = os.read(descriptor, 65536)
        text = self._partial[descriptor] + data
        whole = len(text) if not data or len(text) > _LONGEST else max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._partial[descriptor] = text[whole:]
        messages: list[Message] = []
        shown = b""
        for line in text[:whole].splitlines(keepends=True):
            plain, message = split_message(line) if descriptor == self._errors else (line, None)
            if message is not None:
                messages.append(message)
                self.answered = True
                plain += b"\n" if plain else b""
            elif not self.answered and descriptor == self._errors and plain.strip():
                self.last_line = plain.strip().decode(errors="replace")
            if plain and self.answered:
                shown += self._host.encode() + b": " + plain
        if shown:
            stream = sys.stderr if descriptor == self._errors else sys.stdout
            stream.buffer.write(shown if shown.endswith((b"\n", b"\r")) else shown + b"\n")
            stream.flush()
        if not data:
            self._open.pop(descriptor).close()
        return messages, bool(data)

    def has_ended(self) -> bool:
        """Whether the ssh has ended and its output has been read."""
        return not self._open and self._process.poll() is not None

    def kill(self) -> None:
        """Kill the ssh and its child processes (a proxy command)."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)


@contextmanager
def open_channels(
    hosts: Sequence[Host], starter: StarterOptions, variables: Mapping[str, str]
) -> Iterator[list[Channel]]:
    """A channel to each host; all are killed at the end of the context."""
    channels: list[Channel] = []
    try:
        for host in hosts:
            channels.append(Channel(host.name, starter, variables))
        yield channels
    finally:
        for channel in channels:
            channel.close_input()
            channel.kill()

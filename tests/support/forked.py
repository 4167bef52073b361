"""Python programs that start in hundredths of a second: forks of a process that has imported torch and zeroshard.

    tests: start(words) --argv, environment, directory, pipes--> server --fork--> program
                        <------------- its number, its status -----'

A process of its own imports torch anew, which takes three seconds; a test of the launcher starts several. The program
is a process as any other: it can be signalled, killed and looked up. Rejected: `multiprocessing`, whose children have
neither standard streams nor a working directory of their own.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).resolve().parents[2]
_WIDTH = 16
"""Bytes of an answer of the server."""


class Program:
    """A program that runs, with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, connection: socket.socket, stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self._connection = connection
        self.stdout, self.stderr = stdout, stderr
        self.pid = int(self._answer(60.0))
        self.returncode: int | None = None

    def _answer(self, seconds: float | None) -> str:
        self._connection.settimeout(seconds)
        try:
            answer = self._connection.recv(_WIDTH, socket.MSG_WAITALL)  # number and status may both be there already
        except TimeoutError:
            raise subprocess.TimeoutExpired("program", seconds or 0) from None
        assert len(answer) == _WIDTH, "the server has died"
        return answer.decode()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = int(self._answer(timeout))
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it writes until nobody holds its streams any more."""
        read: dict[str, str] = {"out": "", "err": ""}
        readers = [
            threading.Thread(target=lambda name=name, stream=stream: read.update({name: stream.read()}), daemon=True)
            for name, stream in (("out", self.stdout), ("err", self.stderr))
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired("program", timeout or 0)
        self.wait(timeout)
        return read["out"], read["err"]

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that forks, started when it is first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def connect(self) -> socket.socket:
        """A connection to the server for one program."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            words = [sys.executable, "-m", "tests.support.forked", str(theirs.fileno())]
            environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                words, cwd=_ROOT, env=environment, pass_fds=[theirs.fileno()], start_new_session=True
            )
            theirs.close()
            atexit.register(self._process.kill)
        ours, theirs = socket.socketpair()
        socket.send_fds(self._socket, [b"!"], [theirs.fileno()])
        theirs.close()
        return ours


_SERVER = _Server()


def start(
    words: Sequence[str], directory: Path, environment: Mapping[str, str], out: bool = True, err: bool = True
) -> Program:
    """The `zeroshard` command with these words, or with `-c CODE ARGUMENT...` Python code.

    What is not read is thrown away.
    """
    connection = _SERVER.connect()
    request = json.dumps({"words": list(words), "directory": str(directory), "environment": dict(environment)})
    ends: list[IO[str] | None] = []
    theirs: list[int] = []
    for wanted in (out, err):
        if wanted:
            read, write = os.pipe()
            ends.append(os.fdopen(read))
        else:
            write = os.open(os.devnull, os.O_WRONLY)
            ends.append(None)
        theirs.append(write)
    content = request.encode()
    socket.send_fds(connection, [len(content).to_bytes(8, "big")], theirs)
    connection.sendall(content)
    for descriptor in theirs:
        os.close(descriptor)
    return Program(connection, ends[0], ends[1])


def _serve(descriptor: int) -> None:
    """In the server: fork a program for each connection, and say how it ended."""
    asked = socket.socket(fileno=descriptor)
    with selectors.DefaultSelector() as selector:
        selector.register(asked, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is asked:
                    text, descriptors, *_ = socket.recv_fds(asked, 1, 1)
                    if not text:
                        return
                    connection = socket.socket(fileno=descriptors[0])
                    pid = _fork(connection)
                    connection.sendall(_told(pid))
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
                else:
                    pid, connection = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with suppress(OSError):  # nobody asks any more
                        connection.sendall(_told(code))
                    connection.close()


def _told(number: int) -> bytes:
    return str(number).rjust(_WIDTH).encode()


def _fork(connection: socket.socket) -> int:
    length, streams, *_ = socket.recv_fds(connection, 8, 2)
    size, content = int.from_bytes(length, "big"), b""
    while len(content) < size:
        content += connection.recv(size - len(content))
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            status = _run(json.loads(content), streams)
        finally:
            os._exit(status)
    for stream in streams:
        os.close(stream)
    return pid


def _run(request: dict[str, Any], streams: Sequence[int]) -> int:
    """In the program: become what was asked for; the exit status."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, *streams)):
        os.dup2(descriptor, number)
    os.closerange(3, 4096)  # the connections of the server, and what it has open for others
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    words = request["words"]
    try:
        if words[0] == "-c":
            sys.argv = words[1:]
            exec(words[1], {"__name__": "__main__"})
        else:
            from zeroshard.launch.cli import main

            sys.argv = ["zeroshard", *words]
            main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    import torch.distributed.launcher.api  # noqa: F401

    import tests.support.preload  # noqa: F401
    import zeroshard.launch.restarts  # noqa: F401

    _serve(int(sys.argv[1]))

"""An elastic job of real nodes: each in a network namespace of its own where that may be made, else on the loopback.

    with ElasticJob(directory, hosts, words) as job:
        job.start(0); job.start(1)
        job.power_off(1)               the host is gone: all its processes, and nothing is closed properly

A node's processes are known by a variable that they inherit, so that none is left behind whatever becomes of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.launch.hosts import TestHosts
from tests.launch.launcher import environment
from tests.support.elastic_train import Line, read_log

_MARK = "ZEROSHARD_TEST_NODE"
SCRIPT = str(Path(__file__).with_name("elastic_train.py"))


class ElasticJob:
    """A job whose nodes run `zeroshard run WORDS SCRIPT ARGUMENTS`.

    Args:
        hosts: where nodes run; None for the loopback.
        words: options of `zeroshard run`.
        arguments: of the script, after its directory.
        rendezvous: whether it is a process of its own; else the first node serves it.
    """

    def __init__(
        self,
        directory: Path,
        hosts: TestHosts | None,
        words: list[str],
        arguments: list[str],
        port: int = 29471,
        rendezvous: bool = True,
    ) -> None:
        self._separate = rendezvous
        self.directory, self._hosts, self._words, self._arguments = directory, hosts, words, arguments
        self._port = port
        self._mark = f"{os.getpid()}-{id(self)}"
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._rendezvous: subprocess.Popen[bytes] | None = None
        self.outputs: dict[int, list[str]] = {}

    def __enter__(self) -> ElasticJob:
        if self._separate:
            self._serve()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in list(self._nodes):
            self.power_off(node)
        if self._rendezvous is not None:
            self._rendezvous.kill()
            self._rendezvous.wait()

    @property
    def address(self) -> str:
        return "127.0.0.1" if self._hosts is None else "10.77.0.1"

    def _serve(self) -> None:
        command = [sys.executable, "-m", "zeroshard", "rendezvous", "--port", str(self._port)]
        if self._hosts is not None:
            command = self._hosts._inside(None, command)
        self._rendezvous = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
        assert self._rendezvous.stderr is not None
        said: list[bytes] = []
        while b"may meet" not in (said[-1] if said else b""):
            said.append(self._rendezvous.stderr.readline())
            assert said[-1], said

    def start(self, node: int, env: Mapping[str, str] | None = None) -> None:
        """Start a node, or start it again."""
        command = [sys.executable, "-u", "-m", "zeroshard", "run", *self._words]
        command += ["--master-addr", self.address, "--master-port", str(self._port)]
        command += [SCRIPT, str(self.directory), *self._arguments]
        if self._hosts is not None:
            command = self._hosts._inside(self._hosts.names[node], command)
        marked = environment({"OMP_NUM_THREADS": "1", _MARK: f"{self._mark}-{node}-", **(env or {})})
        process = subprocess.Popen(command, env=marked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._nodes[node] = process
        threading.Thread(target=self._read, args=(node, process), daemon=True).start()

    def _read(self, node: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with (self.directory / f"node-{node}.txt").open("ab", buffering=0) as file:
            for line in process.stdout:
                file.write(f"{time.time():.2f} ".encode() + line)
                self.outputs.setdefault(node, []).append(line.decode(errors="replace").rstrip())

    def terminate(self, node: int) -> None:
        """Send the node SIGTERM, as a scheduler does that wants its host back."""
        self._nodes[node].send_signal(signal.SIGTERM)

    def running(self, node: int) -> bool:
        return node in self._nodes and self._nodes[node].poll() is None

    def wait(self, node: int, seconds: float) -> int:
        return self._nodes[node].wait(seconds)

    def processes(self, node: int) -> dict[int, str]:
        """A node's processes and their command lines."""
        mark, found = f"{_MARK}={self._mark}-{node}-".encode(), {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def ranks(self, node: int) -> list[int]:
        return sorted(pid for pid, words in self.processes(node).items() if "launch/runner.py" in words)

    def agent(self, node: int) -> int | None:
        """torch's agent: the child of the node's guard."""
        guard = self._nodes[node].pid
        children = Path(f"/proc/{guard}/task/{guard}/children")
        found = [int(word) for word in children.read_text().split()] if children.exists() else []
        return found[0] if found else None

    def kill_launcher(self, node: int) -> None:
        """Kill `zeroshard run` outright; what it has started ends with it."""
        self._nodes[node].kill()
        self._nodes[node].wait()
        end = time.monotonic() + 30
        while self.processes(node) and time.monotonic() < end:
            time.sleep(0.1)

    def power_off(self, node: int) -> None:
        """The host is gone."""
        for _ in range(3):
            for pid in self.processes(node):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._nodes[node].wait(20)

    def log(self) -> list[Line]:
        return read_log(self.directory)

    def until(self, what: Callable[[list[Line]], bool], seconds: float) -> list[Line]:
        """Wait for the log to be so; AssertionError with the outputs of all nodes."""
        end = time.monotonic() + seconds
        while not what(lines := self.log()):
            if time.monotonic() > end:
                texts = [f"node {node}:\n" + "\n".join(lines[-25:]) for node, lines in self.outputs.items()]
                raise AssertionError("\n".join(["the job did not get there", *texts]))
            time.sleep(0.02)
        return lines


def made(lines: list[Line], step: int) -> bool:
    """Whether some rank has made a step."""
    return any(line.what == "step" and line.step >= step for line in lines)

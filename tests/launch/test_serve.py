"""`zeroshard rendezvous` serves as long as the nodes of its job need it, and ends with the job's status."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launch.launcher import script, start, zeroshard
from tests.support import forked

_PREFIX = "zeroshard/elastic"


class _Node:
    """A node as the store sees it."""

    def __init__(self, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.store = dist.PrefixStore(_PREFIX, store)
        self.set_state("running")
        self.beat()
        self.store.append("joined", "0,")

    def set_state(self, kind: str) -> None:
        self.store.set("state/0", json.dumps([kind, 0, "", False]))

    def beat(self) -> None:
        self.store.add("heartbeat/0", 1)


def _serve(directory: Path, *words: str) -> tuple[forked.Program, _Node]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    served = start(directory, "rendezvous", "--port", str(port), *words, stderr=subprocess.PIPE)
    assert served.stderr is not None
    assert "may meet" in served.stderr.readline()
    return served, _Node(port)


def test_sigterm_lets_the_nodes_end_first(tmp_path: Path) -> None:
    served, node = _serve(tmp_path)
    served.send_signal(signal.SIGTERM)
    assert served.stderr is not None
    assert "ends when all nodes have" in served.stderr.readline()
    time.sleep(1.5)
    node.set_state("left")  # still answers
    assert served.wait(10) == 0


def test_a_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    served, _ = _serve(tmp_path, "--once")
    served.send_signal(signal.SIGTERM)
    assert served.stderr is not None
    assert "ends when all nodes have" in served.stderr.readline()
    served.send_signal(signal.SIGTERM)
    assert served.wait(10) == 1, "the job has not ended"


@pytest.mark.parametrize(
    ("written", "status"), [({"saved": "1"}, 75), ({"end": '[0, ""]'}, 0), ({"end": '[1, ""]'}, 1)]
)
def test_with_once_its_status_is_that_of_the_job(tmp_path: Path, written: dict[str, str], status: int) -> None:
    served, node = _serve(tmp_path, "--once")
    for name, value in written.items():
        node.store.set(name, value)
    time.sleep(1.5)
    if status == 75:
        node.beat()  # another node may be saving yet
    node.set_state("left")
    assert served.wait(10) == status


def test_ranks_that_start_while_the_job_ends_end_with_it(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keys = dist.PrefixStore(_PREFIX, store)
    words = ["--nodes", "1:2", "--nproc", "1", "--master-addr", "127.0.0.1", "--master-port", str(store.port)]
    node = start(tmp_path, "run", *words, script(tmp_path, "print('trains')"), stderr=subprocess.PIPE)
    keys.wait(["joined"], timedelta(seconds=60))
    keys.set("end", '[0, ""]')  # its ranks are not at the gate yet
    assert node.wait(60) == 0


def test_another_service_at_the_port_of_the_rendezvous_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(b"HTTP/1.0 400 Bad request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        words = ["--nodes", "1:1", "--nproc", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        words += ["--rendezvous-timeout", "5", script(tmp_path, "print('trains')")]
        done = zeroshard(tmp_path, "run", *words)
    assert done.returncode == 2
    assert f"did not meet at 127.0.0.1:{port}: what answers there is another service" in done.stderr

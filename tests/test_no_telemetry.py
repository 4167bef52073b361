"""zeroshard opens no connection beyond the job's own: no usage data, no look-up of versions, no download.

Two things look at each rank while it builds an engine, trains, saves and loads: Python's audit events of sockets and
names, and the kernel's table of the process's own sockets, which has those of native code too.
"""

from __future__ import annotations

import ast
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from tests.support.distributed import run_ranks

_CLIENTS = {"http", "urllib", "requests", "httpx", "aiohttp", "smtplib", "ftplib", "xmlrpc", "telnetlib", "sentry_sdk"}
_EVENTS = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}
_TABLES = ("tcp", "tcp6", "udp", "udp6")


def _is_here(host: object) -> bool:
    """Whether a name or address is this host's: only those can be bound."""
    if host in ("", "localhost", None, os.uname().nodename):
        return True
    try:
        address = ipaddress.ip_address(str(host).split("%")[0])
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except (ValueError, OSError):
        return False
    return True


class _Watch:
    """Collects hosts beyond this one that this process looks up or sends to, as Python sees it."""

    def __init__(self) -> None:
        self.elsewhere: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS:
            return
        found = arguments[1] if event.startswith(("socket.connect", "socket.send")) else arguments[0]
        host = found[0] if isinstance(found, tuple) else found
        if isinstance(found, (str, bytes)) and not event.startswith("socket.get"):
            return  # the path of a Unix socket
        if not _is_here(host):
            self.elsewhere.append(f"{event} {found!r}")


def _remote_hosts() -> Iterator[str]:
    """Remote addresses of this process's own sockets."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    for table in _TABLES:
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] not in own:
                continue
            digits = words[2].split(":")[0]
            parts = [bytes.fromhex(digits[place : place + 8])[::-1] for place in range(0, len(digits), 8)]
            address = ipaddress.ip_address(b"".join(parts))
            mapped = getattr(address, "ipv4_mapped", None)
            yield str(mapped or address)


def _works(rank: int, world: int, base: Path) -> tuple[list[str], set[str]]:
    watch = _Watch()
    sys.addaudithook(watch)
    hosts: set[str] = set()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3},
        "csv_monitor": {"enabled": True, "output_path": str(base / "csv")},
        "checkpoint": {"audit": True},
    }
    engine = zeroshard.initialize(model=torch.nn.Linear(7, 5), config=config)[0]
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 7)).square().mean())
        engine.step()
        hosts.update(_remote_hosts())
    engine.save_checkpoint(str(base / "checkpoints"))
    engine.load_checkpoint(str(base / "checkpoints"))
    zeroshard.full_state_dict(engine.module)
    hosts.update(_remote_hosts())
    engine.destroy()
    hosts.update(_remote_hosts())
    return watch.elsewhere, {host for host in hosts if not ipaddress.ip_address(host).is_unspecified}


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_a_run_reaches_its_own_ranks_only(tmp_path: Path) -> None:
    for elsewhere, hosts in run_ranks(2, _works, tmp_path):
        assert not elsewhere
        assert hosts, "the store's connection should be seen"
        assert all(_is_here(host) for host in hosts), hosts


def test_the_watch_sees_hosts_elsewhere() -> None:
    watch = _Watch()
    watch("socket.connect", (None, ("192.0.2.1", 443)))
    watch("socket.getaddrinfo", ("example.org", 443, 0, 0, 0))
    watch("socket.connect", (None, ("127.0.0.1", 29500)))
    watch("socket.connect", (None, "/run/a.sock"))
    assert len(watch.elsewhere) == 2


def test_no_file_of_the_packages_imports_a_client_of_the_network() -> None:
    root = Path(__file__).resolve().parent.parent
    found: list[str] = []
    for file in (*root.glob("zeroshard/**/*.py"), *root.glob("compat/deepspeed/src/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            found += [f"{file.relative_to(root)}: {name}" for name in names if name.split(".")[0] in _CLIENTS]
    assert not found

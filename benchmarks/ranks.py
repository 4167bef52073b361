"""Starts the ranks of one measurement on this machine, and ends them all when one fails or time is up.

torchrun does the same and loads torch before it starts anything; on a rented GPU those seconds count in every
measurement, so compare.py starts the ranks itself, with the variables that torchrun would set.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0
TAIL_LINES = 24


@dataclass(frozen=True)
class Finished:
    """How it ended.

    Attributes:
        output: what rank 0 wrote on stdout.
        log: the ends of what the ranks wrote on stderr, those that failed first.
        error: None when every rank ended well.
    """

    output: str
    log: str
    error: str | None
    seconds: float


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    nproc: int,
    timeout: float,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run `python -m module arguments` in `nproc` processes that find each other; wait for them at most `timeout` s."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        logs = [Path(folder) / f"{rank}.err" for rank in range(nproc)]
        outputs = [Path(folder) / f"{rank}.out" for rank in range(nproc)]
        port = _free_port()
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(nproc):
                with outputs[rank].open("wb") as out, logs[rank].open("wb") as err:
                    command = [python, "-m", module, *arguments]
                    variables = _variables(rank, nproc, port, environment or {})
                    ranks.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=out, stderr=err))
            error = _wait(ranks, began + timeout)
        finally:
            _end(ranks)
        order = sorted(range(nproc), key=lambda rank: not ranks[rank].returncode)
        log = "\n".join(_tail(logs[rank], f"rank {rank}: ") for rank in order)
        return Finished(outputs[0].read_text(errors="replace"), log, error, time.monotonic() - began)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Wait for all ranks, or for the first failure, or for the deadline; what went wrong."""
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        for rank, code in enumerate(codes):
            if code:
                time.sleep(GRACE_SECONDS if None in codes else 0.0)
                return f"rank {rank} ended with code {code}"
        if None not in codes:
            return None
        time.sleep(POLL_SECONDS)
    return "out of time"


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _variables(rank: int, nproc: int, port: int, more: Mapping[str, str]) -> dict[str, str]:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, **own, **more}


def _free_port() -> int:
    """A port below those that the system gives out by itself: a rank that comes first and tries to connect to one of
    these may be given it for its own end, and then is connected to itself."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _tail(path: Path, prefix: str) -> str:
    lines = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(prefix + line for line in lines)

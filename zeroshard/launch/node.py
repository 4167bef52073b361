"""A node's part of a job, guarded: its devices, ranks, threads and cores are decided, then the agent runs.

    zeroshard run, one node            run_node(job)
    zeroshard run, by ssh:             python -m zeroshard.launch.node  <- job, beats, stop on standard input

The other end of an ssh can't be signalled. So the launcher holds the node's standard input: what ends the launcher,
its ssh, the network between, ends the input or silences it, and the node ends itself.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
from pathlib import Path

import zeroshard
from zeroshard.errors import UsageError, ZeroShardError
from zeroshard.launch.elastic.rounds import Limits
from zeroshard.launch.guard import FORWARDED, Tell, guarded
from zeroshard.launch.job import ORDERED_FILE, Job
from zeroshard.launch.messages import say, send
from zeroshard.launch.network import choose_interface
from zeroshard.launch.resources import gpu_count, resolve_nproc

# The launcher sends a beat every five seconds.
_SILENCE_SECONDS = 60.0


def run_node(job: Job) -> int:
    """Run this node's ranks under a guard; the exit status."""
    return guarded(
        lambda directory: start(job, directory),
        _say_killed,
        _await_end_of_input if job.ends_with_input else None,
    )


def _say_killed(number: signal.Signals) -> None:
    if number in FORWARDED:  # it was meant for all of us, and came before the agent could hear it
        say(f"zeroshard: {number.name} received, all ranks ended")
    else:
        say(f"zeroshard: the agent was killed by {number.name}; ending all ranks")


def _await_end_of_input(tell: Tell, directory: str) -> None:
    """In a thread of the guard."""
    while os.read(0, 65536):
        pass
    tell(signal.SIGTERM)


def start(job: Job, directory: str) -> int:
    """Decide what the node leaves open, and run the agent. In the guard's child: torch is loaded here."""
    from zeroshard.launch.binding import bind_ranks
    from zeroshard.launch.elastic.node import run_elastic
    from zeroshard.launch.restarts import Places, run_with_restarts

    if job.over_ssh or job.ends_with_input:
        _leave_input()
    if job.devices is not None:
        _show_devices(job.devices)
    if (job.nnodes > 1 or job.nodes is not None) and job.master_addr is not None:
        choose_interface(job.master_addr, os.environ)
    if job.nodes is not None:
        ranks = resolve_nproc(job.nproc)
        return run_elastic(job, ranks, Path(directory), _limits(job), lambda: bind_ranks(job, ranks, os.environ))
    places = Places.of_this_node(resolve_nproc(job.nproc), gpu_count())
    return run_with_restarts(job, Path(directory), places, lambda ranks: bind_ranks(job, ranks, os.environ))


def _limits(job: Job) -> Limits:
    assert job.nodes is not None
    least, most = job.nodes
    return Limits(
        least,
        most,
        job.spares,
        job.sizes,
        lost_after=job.lost_after,
        last_call=job.last_call,
        timeout=job.rendezvous_timeout,
    )


def _leave_input() -> None:
    """What comes on standard input is for the guard and not for the ranks."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _show_devices(devices: tuple[int, ...]) -> None:
    """Narrow CUDA_VISIBLE_DEVICES, which may be narrowed already: numbers are among those that it shows."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(number) for number in range(max(devices) + 1)]
    if shown == "":
        return  # no GPU is shown: the slots are places on CPU
    if max(devices) >= len(names):
        raise UsageError(f"slot {max(devices)}: CUDA_VISIBLE_DEVICES={shown} shows {len(names)} GPUs on this node")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[device] for device in devices)


def main() -> int:
    """The far end of a launcher's ssh."""
    lines = _Input()
    send(kind="hello", **_hello())
    text = lines.read(None)
    if not text:
        return 1  # the launcher gave up, which it has told its user
    try:
        job = Job.from_json(text)
    except ZeroShardError as error:
        say(f"zeroshard: {error}")
        return 2
    status = guarded(
        lambda directory: start(job, directory),
        lambda number: send(kind="killed", signal=number.name),
        lambda tell, directory: _obey(lines, tell, directory),
    )
    send(kind="left", status=status)
    return status


def _hello() -> dict[str, str | int | None]:
    # "client address, client port, server address, server port": the address under which this host was reached.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    address = connection[2] if len(connection) == 4 else None
    return {"version": zeroshard.__version__, "address": address, "port": port}


def _obey(lines: _Input, tell: Tell, directory: str) -> None:
    """In a thread of the guard: send the child what the launcher says; its end or its silence is SIGTERM."""
    while line := lines.read(_SILENCE_SECONDS):
        word, _, argument = line.partition(" ")
        if word == "stop":
            Path(directory, ORDERED_FILE).touch()
            tell(signal.Signals[argument])
    tell(signal.SIGTERM)


class _Input:
    """Standard input by lines, without read-ahead in a buffer that a wait for readability would not see."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._held = b""

    def read(self, seconds: float | None) -> str:
        """The next line; empty at the end, or when nothing came for so long."""
        while b"\n" not in self._held:
            if not self._selector.select(seconds):
                return ""
            data = os.read(0, 65536)
            if not data:
                return ""
            self._held += data
        line, self._held = self._held.split(b"\n", 1)
        return line.decode()


if __name__ == "__main__":
    sys.exit(main())

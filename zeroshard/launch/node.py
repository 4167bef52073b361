"""Runs a node's part of a job under a guard: decides devices, ranks, threads and cores, then runs the agent.

    zeroshard run, one node            run_node(job)
    zeroshard run, by ssh              python -m zeroshard.launch.node  <- job, heartbeats, stop on standard input

A launcher can't send signals through an ssh. Instead it holds the node's standard input: if the launcher, its ssh or
the network fails, the input ends or no heartbeat comes any more, and the node ends itself.
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
from zeroshard.launch.guard import FORWARDED, SendSignal, run_guarded
from zeroshard.launch.job import ORDERED_FILE, Job
from zeroshard.launch.messages import say, send
from zeroshard.launch.network import choose_interface
from zeroshard.launch.resources import gpu_count, resolve_nproc

# The launcher sends a heartbeat every five seconds.
_SILENCE_SECONDS = 60.0


def run_node(job: Job) -> int:
    """Run this node's ranks under a guard; returns the exit status."""
    return run_guarded(
        lambda directory: start(job, directory),
        _say_killed,
        _await_end_of_input if job.ends_with_input else None,
    )


def _say_killed(number: signal.Signals) -> None:
    if number in FORWARDED:  # a stop signal that came before the agent handled such signals
        say(f"zeroshard: {number.name} received, all ranks ended")
    else:
        say(f"zeroshard: the agent was killed by {number.name}; ending all ranks")


def _await_end_of_input(send_signal: SendSignal, directory: str) -> None:
    """Send SIGTERM when standard input ends; runs in a thread of the guard."""
    while os.read(0, 65536):
        pass
    send_signal(signal.SIGTERM)


def start(job: Job, directory: str) -> int:
    """Decide devices, ranks, threads and cores, and run the agent; in the guard's child, where torch is loaded."""
    from zeroshard.launch.binding import bind_ranks
    from zeroshard.launch.elastic.node import ElasticNode
    from zeroshard.launch.restarts import Places, run_with_restarts

    if job.over_ssh or job.ends_with_input:
        _detach_input()
    if job.devices is not None:
        _show_devices(job.devices)
    if (job.nnodes > 1 or job.nodes is not None) and job.master_addr is not None:
        choose_interface(job.master_addr, os.environ)
    if job.nodes is not None:
        ranks = resolve_nproc(job.nproc)
        node = ElasticNode(job, ranks, Path(directory), _limits(job))
        return node.run(lambda: bind_ranks(job, ranks, os.environ))
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


def _detach_input() -> None:
    """Replace standard input by /dev/null: only the guard reads it, not the ranks."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _show_devices(devices: tuple[int, ...]) -> None:
    """Restrict CUDA_VISIBLE_DEVICES to some of the GPUs that it shows at present, by their numbers among these."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(number) for number in range(max(devices) + 1)]
    if shown == "":
        return  # no GPU is visible: the slots are CPU ranks
    if max(devices) >= len(names):
        raise UsageError(f"slot {max(devices)}: CUDA_VISIBLE_DEVICES={shown} shows {len(names)} GPUs on this node")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[device] for device in devices)


def main() -> int:
    """Run the node at the other end of a launcher's ssh; returns the exit status."""
    lines = _Input()
    send(kind="hello", **_hello())
    text = lines.read(None)
    if not text:
        return 1  # the launcher has ended, and has said why
    try:
        job = Job.from_json(text)
    except ZeroShardError as error:
        say(f"zeroshard: {error}")
        return 2
    status = run_guarded(
        lambda directory: start(job, directory),
        lambda number: send(kind="killed", signal=number.name),
        lambda send_signal, directory: _follow_launcher(lines, send_signal, directory),
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


def _follow_launcher(lines: _Input, send_signal: SendSignal, directory: str) -> None:
    """Send the child the signals that the launcher asks for, and SIGTERM if its input ends or is silent for long.

    Runs in a thread of the guard.
    """
    while line := lines.read(_SILENCE_SECONDS):
        word, _, argument = line.partition(" ")
        if word == "stop":
            Path(directory, ORDERED_FILE).touch()
            send_signal(signal.Signals[argument])
    send_signal(signal.SIGTERM)


class _Input:
    """Reads standard input by lines, unbuffered, so that a selector shows all input that was not read yet."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._buffer = b""

    def read(self, seconds: float | None) -> str:
        """The next line; "" at the end of the input, or if nothing came for so many seconds (None: no limit)."""
        while b"\n" not in self._buffer:
            if not self._selector.select(seconds):
                return ""
            data = os.read(0, 65536)
            if not data:
                return ""
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()


if __name__ == "__main__":
    sys.exit(main())

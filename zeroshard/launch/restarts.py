"""Starts this node's ranks, and again after failures; under `zeroshard run --elastic CONFIG` as many as are left.

    4 places, 1 2 4 allowed --> 4 ranks --rank 2 is killed--> places 0 1 3 --> 2 ranks: they load, the batch stays

With --elastic a place (a GPU, or a share of the cores) whose rank was killed by a signal is left out from the next
start on, and one whose rank failed first twice running; a rank that failed once with an error may go on where it was.

Each start is an agent with a rendezvous and a store of its own. The agent's own restarts were rejected: they know one
number of ranks, and its store keeps what the ranks before have written, addresses of the dead included, so that gloo
waits for them (torch 2.13).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from zeroshard.errors import UsageError
from zeroshard.launch.agent import Outcome, Ranks, launch
from zeroshard.launch.job import Job
from zeroshard.launch.messages import say

_THREADS = "OMP_NUM_THREADS"
_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Places:
    """Where ranks may run on this node.

    Attributes:
        devices: what CUDA_VISIBLE_DEVICES may name, one per place; None without GPUs.
        suspect: the place where a rank failed first with an error in the last start.
    """

    count: int
    devices: tuple[str, ...] | None = None
    suspect: int | None = None

    @staticmethod
    def of_this_node(ranks: int, gpus: int) -> Places:
        """As many as ranks are wanted."""
        if not gpus:
            return Places(ranks)
        shown = os.environ.get(_DEVICES)
        names = tuple(shown.split(",")) if shown else tuple(str(number) for number in range(gpus))
        return Places(ranks, names[:ranks])

    def after(self, outcome: Outcome) -> Places:
        """Those for the next start."""
        place = outcome.first_local_rank
        if place is None or not (outcome.killed or place == self.suspect):
            return replace(self, suspect=place)
        devices = self.devices
        if devices is not None:
            devices = devices[:place] + devices[place + 1 :]
        return Places(self.count - 1, devices)


def run_with_restarts(job: Job, directory: Path, places: Places, prepare: Callable[[int], str]) -> int:
    """Start, and after failures start again, at most `job.max_restarts` times; the exit status.

    Args:
        prepare: sets threads and cores for so many ranks, and says so.

    Raises:
        UsageError: there are fewer places than the smallest allowed number of ranks.
    """
    own_threads = _THREADS not in os.environ
    ranks = _allowed(job, places)
    if ranks is None:
        sizes = ", ".join(map(str, job.sizes or ()))
        raise UsageError(f"--elastic: this node has place for {places.count} ranks, the config allows {sizes}")
    for restart in range(job.max_restarts + 1):
        if own_threads:
            os.environ.pop(_THREADS, None)
        if job.sizes is not None and places.devices is not None:
            os.environ[_DEVICES] = ",".join(places.devices[:ranks])
        say(f"zeroshard: {ranks} rank{'s' if ranks > 1 else ''} on this node, {prepare(ranks)}")
        outcome = launch(Ranks(job, ranks, directory, restart))
        places = places if job.sizes is None else places.after(outcome)
        if not outcome.failed or restart == job.max_restarts:
            return outcome.status
        ranks = _allowed(job, places)
        if ranks is None:
            say(f"zeroshard: place for {places.count} ranks is left, and the config allows no number so small")
            return outcome.status
        say(f"zeroshard: restart {restart + 1} of {job.max_restarts}")
    raise AssertionError("unreachable")


def _allowed(job: Job, places: Places) -> int | None:
    if job.sizes is None:
        return places.count
    return max((size for size in job.sizes if size <= places.count), default=None)

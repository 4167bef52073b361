"""Starts this node's ranks, and restarts them after failures; with `zeroshard run --elastic CONFIG` maybe fewer ranks.

    4 places, 1 2 4 allowed --> 4 ranks --rank 2 is killed--> places 0 1 3 --> 2 ranks load, with the same global batch

With --elastic, a place (a GPU, or a share of the cores) is not used again if a signal killed its rank, or if its rank
failed first in two consecutive starts; after a single error it is used again.

Each start is a new agent with a new rendezvous and store. The agent's own restarts were rejected: they have one number
of ranks, and its store keeps what the former ranks have written, also addresses of ended ranks, for which gloo waits
(torch 2.13).
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
    """The places for ranks on this node.

    Attributes:
        count: number of places.
        devices: the name of each place's GPU for CUDA_VISIBLE_DEVICES; None without GPUs.
        suspect: the place whose rank failed first with an error in the last start; None if there is none.
    """

    count: int
    devices: tuple[str, ...] | None = None
    suspect: int | None = None

    @staticmethod
    def of_this_node(ranks: int, gpus: int) -> Places:
        """One place for each rank."""
        if not gpus:
            return Places(ranks)
        shown = os.environ.get(_DEVICES)
        names = tuple(shown.split(",")) if shown else tuple(str(number) for number in range(gpus))
        return Places(ranks, names[:ranks])

    def after(self, outcome: Outcome) -> Places:
        """The places for the next start."""
        place = outcome.first_local_rank
        if place is None or not (outcome.killed or place == self.suspect):
            return replace(self, suspect=place)
        devices = self.devices
        if devices is not None:
            devices = devices[:place] + devices[place + 1 :]
        return Places(self.count - 1, devices)


def run_with_restarts(job: Job, directory: Path, places: Places, prepare: Callable[[int], str]) -> int:
    """Start the ranks, and restart them after failures at most `job.max_restarts` times; returns the exit status.

    Args:
        prepare: sets threads and cores for so many ranks, and returns a description for the user.

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
            say(f"zeroshard: there is place for {places.count} ranks, and the config allows no number so small")
            return outcome.status
        say(f"zeroshard: restart {restart + 1} of {job.max_restarts}")
    raise AssertionError("unreachable")


def _allowed(job: Job, places: Places) -> int | None:
    if job.sizes is None:
        return places.count
    return max((size for size in job.sizes if size <= places.count), default=None)

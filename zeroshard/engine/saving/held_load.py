"""Loads the state that the nodes of an elastic job hold in memory: the newest version that is complete.

    rank 0       asks all memory_servers for their versions ---> broadcasts the list, newest first
    every rank   reads the tables of one version, verifies all of it, and loads its part

If some rank can't read a version completely, all ranks try the one before. If none is left, the job continues from its
newest checkpoint on disk.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from zeroshard.checkpoint.error_barrier import on_all_ranks
from zeroshard.checkpoint.state_images import ImageReader, StateImage, parse_table
from zeroshard.elastic.memory import MemoryClient, Version
from zeroshard.elastic.place import Place
from zeroshard.engine.core.handle import Handle, handle_of
from zeroshard.engine.saving.all_stages import WholeModel, whole_model
from zeroshard.engine.saving.checkpoints import saver_of
from zeroshard.engine.saving.prepared_load import EVERYTHING, Loaded, PreparedLoad
from zeroshard.engine.step.attached import find_stepper
from zeroshard.errors import CheckpointError

_LOGGER = logging.getLogger("zeroshard")
_MOST_VERSIONS = 8


class _MemoryServers:
    """The memory_servers that answer, this node's first."""

    def __init__(self, place: Place) -> None:
        order = [place.memory_servers[place.group_rank], *place.memory_servers]
        self._links: dict[tuple[str, int], MemoryClient] = {}
        self._images: list[tuple[MemoryClient, str, dict[str, Any]]] = []
        for address in dict.fromkeys(order):
            with suppress(OSError):
                link = MemoryClient(address, place.token)
                self._links[address] = link
                where = f"{address[0]}:{address[1]}"
                self._images += [(link, where, image) for image in link.images()]

    def versions(self) -> list[Version]:
        """Newest first."""
        found = {(image["version"][0], image["version"][1]) for _, _, image in self._images}
        return sorted(found, reverse=True)[:_MOST_VERSIONS]

    def images(self, version: Version) -> list[StateImage]:
        found: list[StateImage] = []
        for link, where, image in self._images:
            if tuple(image["version"]) == version:
                with suppress(OSError, LookupError, ValueError):
                    table = parse_table(link.table(image["image"]))
                    found.append(StateImage(link, image["image"], where, image["rank"], table))
        return found

    def close(self) -> None:
        for link in self._links.values():
            link.close()


def load_held(model: nn.Module, place: Place, scheduler: Any, least: int) -> Loaded | None:
    """Take over the newest state that is whole; called by all ranks.

    Args:
        least: steps that a checkpoint on disk has, on rank 0; a version with fewer is not taken.

    Returns:
        What was found beside the tensors; None where no version of so many steps is left.
    """
    handle = handle_of(model)
    barrier = saver_of(handle).barrier()
    saver_of(handle).wait()
    memory_servers = _MemoryServers(place)
    try:
        own = [version for version in memory_servers.versions() if version[1] >= least] if barrier.rank == 0 else []
        versions: list[Sequence[int]] = json.loads(barrier.broadcast_text(json.dumps(own), 0))
        names = whole_model(handle, model) if versions else None
        for number, step in versions:
            assert names is not None
            try:
                return _load(handle, model, scheduler, memory_servers, (number, step), names)
            except CheckpointError as error:
                if barrier.rank == 0:
                    _LOGGER.warning("the state of step %d in memory is not used: %s", step, error)
        return None
    finally:
        memory_servers.close()


def _load(
    handle: Handle,
    model: nn.Module,
    scheduler: Any,
    memory_servers: _MemoryServers,
    version: Version,
    names: WholeModel,
) -> Loaded:
    """Raises CheckpointError, on all ranks, where the version is not whole; nothing was changed then."""
    barrier, what = saver_of(handle).barrier(), f"step {version[1]} of round {version[0]} in memory"

    def prepare() -> PreparedLoad:
        handle.runtime.drain()
        handle.check_members()
        reader = ImageReader(memory_servers.images(version), what)
        return PreparedLoad(handle, model, find_stepper(model), scheduler, reader, EVERYTHING, names)

    prepared = on_all_ranks(barrier, prepare, what, "; nothing was changed here")
    prepared.apply(barrier)
    return prepared.loaded

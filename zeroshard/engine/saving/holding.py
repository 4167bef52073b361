"""Keeps copies of an elastic job's state in the nodes' memory, so that it continues without a disk after a loss.

    main thread   copy this rank's part into its node's memory       every few steps, and when the round ends
    a thread      checksums, table, hold; then a copy to the next node, unless another rank has the same part

A version (round, step) is whole when all ranks hold it, which they count in their store. One of a rank's two slots
always keeps the newest version that is known to be whole, so that there is always a version that is whole on all nodes.

If there are replicas of the state on other nodes (`dp_replicate`) nothing is sent, since they are the copy.
Rejected: copies through collectives, which would have to be issued by all ranks in the order of the training's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.checkpoint.generators import generator_states
from zeroshard.checkpoint.state_images import copy_pieces, describe, image_nbytes
from zeroshard.checkpoint.writer import Piece
from zeroshard.elastic.memory import MemoryClient, NodeMemory, Slot, Version
from zeroshard.elastic.place import Place
from zeroshard.elastic.session import Session
from zeroshard.engine.core.handle import Handle, handle_of
from zeroshard.engine.saving.all_stages import WholeModel, whole_model
from zeroshard.engine.saving.checkpoints import ClientState, saved_state
from zeroshard.engine.saving.saved_model import pieces
from zeroshard.engine.step.attached import find_stepper
from zeroshard.mesh import REPLICATE, SHARD

_LOGGER = logging.getLogger("zeroshard")
_NOTHING: Version = (-1, -1)


@dataclass(frozen=True)
class _Copied:
    """A copy of this rank's part after a step, in its slot, for the thread to finish."""

    slot: Slot
    version: Version
    parts: Sequence[Piece]
    rest: Mapping[str, Any]
    before: Version


class Holding:
    """Keeps the state of `model` after every `every` steps; made and called by all ranks."""

    def __init__(self, model: nn.Module, session: Session, every: int) -> None:
        self._model, self._place, self._every = model, session.place, every
        handle = handle_of(model)
        self._memory = NodeMemory()
        self._store = _round_store(handle, self._place)
        self._ranks, self._rank = handle.comm.ranks, handle.comm.rank
        self._next_memory_server = None if has_copy_elsewhere(handle, self._place) else next_memory_server(self._place)
        self._names: WholeModel | None = None
        self._running: threading.Thread | None = None
        self._whole, self._latest = _NOTHING, _NOTHING

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that this rank has taken."""
        return self._memory.nbytes

    def due(self, steps: int) -> bool:
        """Whether the state after so many steps is kept; on all ranks alike."""
        return steps % self._every == 0

    def hold(
        self,
        steps: int,
        *,
        scheduler: Any,
        client_state: ClientState,
        counters: Mapping[str, Any],
        patient: bool = False,
    ) -> None:
        """Keep the present state; does nothing while the last copy is unfinished, unless `patient`.

        Args:
            patient: return when it is kept.
        """
        if self._running is not None and self._running.is_alive() and not patient:
            return
        if self._latest == (self._place.round, steps):
            self.finish()
            return
        self.finish()
        self._update_newest_whole()
        copied = self._copy(steps, scheduler, client_state, counters)
        self._latest = copied.version
        self._running = threading.Thread(target=self._finish, args=(copied,), name="zeroshard-holding", daemon=True)
        self._running.start()
        if patient:
            self.finish()

    def finish(self) -> None:
        """Wait until what is being kept is kept."""
        if self._running is not None:
            self._running.join()
            self._running = None

    def close(self) -> None:
        """Keep no more; what is kept stays."""
        self._memory.close()

    def _update_newest_whole(self) -> None:
        """Update the newest whole version, if all ranks hold the latest one now."""
        if self._latest != _NOTHING and self._store.add(_key(self._latest), 0) >= self._ranks:
            self._whole = self._latest

    def _copy(self, steps: int, scheduler: Any, client_state: ClientState, counters: Mapping[str, Any]) -> _Copied:
        handle, stepper = handle_of(self._model), find_stepper(self._model)
        handle.runtime.drain_for_saving()
        if self._names is None:
            self._names = whole_model(handle, self._model)
        state = saved_state(handle, self._model, stepper, scheduler, client_state, counters, True, self._names)
        parts = pieces(handle, None if stepper is None else stepper.update, copies=True)
        slot = self._memory.take(image_nbytes(parts), self._whole)
        copy_pieces(parts, slot.values)
        if handle.device.type == "cuda":
            torch.cuda.current_stream(handle.device).synchronize()
        handle.comm.watchdog.raise_if_failed()  # of a lost rank: what was copied after that may be wrong
        rest = {
            "world_size": self._ranks,
            "aliases": dict(self._names.aliases),
            "state": state,
            "rank_state": {"generators": generator_states(handle.device)},
        }
        return _Copied(slot, (self._place.round, steps), parts, rest, self._whole)

    def _finish(self, copied: _Copied) -> None:
        """In the thread."""
        try:
            table = describe(copied.parts, copied.slot.values, copied.rest)
            self._memory.hold(copied.slot, copied.version, self._rank, table, copied.before)
            if self._next_memory_server is not None:
                link = MemoryClient(self._next_memory_server, self._place.token)
                try:
                    link.push(copied.slot, copied.version, self._rank, table.encode(), copied.before)
                finally:
                    link.close()
            self._store.add(_key(copied.version), 1)
        except (OSError, RuntimeError) as error:  # a node is lost, or the round's store is
            _LOGGER.warning("the state of step %d is not kept in memory: %s", copied.version[1], error)


def _round_store(handle: Handle, place: Place) -> dist.Store:
    """A store client for this object alone; one rank has a store in memory."""
    found = handle.comm.mesh.store() if handle.comm.stages is None else handle.comm.stages.store
    if found is None:
        return dist.HashStore()
    own: dist.Store = found.clone()  # pyright: ignore[reportAttributeAccessIssue]  (torch's stub lacks it)
    return dist.PrefixStore(f"zeroshard/held/{place.round}", own)


def _key(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def next_memory_server(place: Place) -> tuple[str, int] | None:
    """The memory_server of the next node of the round; None where there is one node alone."""
    nodes = len(place.counts)
    return place.memory_servers[(place.group_rank + 1) % nodes] if nodes > 1 else None


def has_copy_elsewhere(handle: Handle, place: Place) -> bool:
    """Whether a rank on another node holds the same part of all state as this one."""
    mesh = handle.plan.mesh
    if handle.comm.stages is not None or any(
        axis.size > 1 for axis in mesh.axes if axis.name not in (REPLICATE, SHARD)
    ):
        return False
    for unit, group in handle.plan.groups():
        if REPLICATE in unit.axes_of(group) or not group.layout.shards:
            return False
    node_of = [node for node, count in enumerate(place.counts) for _ in range(count)]
    own = mesh.position(handle.comm.rank, (SHARD,))
    return any(
        mesh.position(rank, (SHARD,)) == own and node_of[rank] != place.group_rank for rank in range(mesh.world_size)
    )

"""Saves: the steps by which ranks make one checkpoint, at once or in a thread while training goes on.

    main thread   the last save has ended -> rank 0 makes an empty folder -> [copy into staging memory]
    either        every rank writes its files -> rank 0 joins the tables, gives the folder its name, prunes

At every moment the newest checkpoint that `directory.find` gives is whole. A failure anywhere fails on all ranks and
leaves what was there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.checkpoint import directory
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.meeting import CollectiveMeeting, Meeting, StoreMeeting, together
from zeroshard.checkpoint.staging import Staging
from zeroshard.checkpoint.writer import Piece, join_tables, write_pieces
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.watchdog import Watchdog
from zeroshard.errors import CheckpointError, ZeroShardError

_LOGGER = logging.getLogger("zeroshard")


@dataclass(frozen=True)
class Request:
    """One checkpoint to be saved, as one rank sees it.

    Attributes:
        pieces: what this rank writes; all ranks' together are all of each tensor, once.
        aliases, state: equal on all ranks (rank 0's are written); `own` is this rank's. As JSON has them.
        latest: whether it becomes the newest.
        keep: how many checkpoints are left in the directory, None for all.
    """

    base: Path
    tag: str
    pieces: Sequence[Piece]
    aliases: Mapping[str, str]
    state: Mapping[str, Any]
    own: Mapping[str, Any]
    latest: bool = True
    keep: int | None = None

    @property
    def final(self) -> Path:
        return self.base / self.tag


class Saver:
    """Saves the checkpoints of one run, one after the other. All methods are called by all ranks.

    Args:
        control: communicator of all ranks that save.
        store: their store, None for a single rank.
        device: on which the state lives.
    """

    def __init__(
        self, control: Collectives, store: dist.Store | None, watchdog: Watchdog, device: torch.device
    ) -> None:
        self._here = CollectiveMeeting(control, device)
        self._store, self._watchdog = store, watchdog
        self._staging = Staging(device)
        self._count = 0
        self._running: threading.Thread | None = None
        self._problem: ZeroShardError | None = None

    @property
    def staging_nbytes(self) -> int:
        """Host bytes that asynchronous saves have taken for their copy."""
        return self._staging.nbytes

    def meeting(self) -> CollectiveMeeting:
        """The main threads of all ranks, for a load."""
        return self._here

    def save(self, request: Request, *, background: bool) -> None:
        """Save now, or copy now and write in a thread.

        Raises:
            CheckpointError: this save, or the one before that was still being written, failed.
        """
        self.wait()
        base, tag = request.base, request.tag
        first = self._here.rank == 0
        if not self._here.same(f"{tag} {request.latest} {request.keep} {background}"):
            raise CheckpointError(
                f"checkpoint {request.final}: the ranks do not agree on tag, save_latest, keep and async (this rank: "
                f"tag {tag!r}, {request.latest}, {request.keep}, {background}); give all the same"
            )
        together(self._here, lambda: _begin(base, tag) if first else None, request.final)
        if not background:
            self._write(request, self._here)
            return
        self._count += 1
        meeting = StoreMeeting(self._store, self._here.rank, self._here.size, str(self._count), self._watchdog)
        staged = replace(request, pieces=self._staging.copy(request.pieces))
        self._running = threading.Thread(
            target=self._in_thread, args=(staged, meeting), name=f"checkpoint {tag}", daemon=False
        )
        self._running.start()

    def wait(self) -> None:
        """Wait for the save that is being written. Raises CheckpointError where it, or one before, failed."""
        if self._running is not None:
            self._running.join()
            self._running = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise CheckpointError(f"an asynchronous save failed: {problem}") from problem

    def close(self) -> None:
        """Wait, log a failure that nobody has asked for, and give the staging memory back."""
        try:
            self.wait()
        except CheckpointError as error:
            _LOGGER.error("%s", error)
        self._staging.close()

    def _in_thread(self, request: Request, meeting: Meeting) -> None:
        try:
            self._write(request, meeting)
        except (ZeroShardError, RuntimeError) as error:  # RuntimeError: the store is gone with its process
            self._problem = CheckpointError(str(error))
            _LOGGER.error("asynchronous save of %s failed: %s", request.final, error)

    def _write(self, request: Request, meeting: Meeting) -> None:
        folder = directory.partial_folder(request.base, request.tag)
        unchanged = "; the checkpoints that were there are unchanged"
        together(
            meeting,
            lambda: write_pieces(folder, meeting.rank, request.pieces, request.own),
            request.final,
            unchanged,
        )
        together(
            meeting, lambda: _finish(request, meeting.size) if meeting.rank == 0 else None, request.final, unchanged
        )


def _begin(base: Path, tag: str) -> None:
    directory.check_tag(tag)
    directory.begin(base, tag)


def _finish(request: Request, ranks: int) -> None:
    folder = directory.partial_folder(request.base, request.tag)
    manifest = join_tables(folder, ranks, request.aliases, request.state)
    directory.write_synced(folder / MANIFEST, manifest.encode())
    directory.publish(request.base, request.tag, latest=request.latest)
    if request.keep is not None:
        directory.prune(request.base, request.keep, protect=request.tag)

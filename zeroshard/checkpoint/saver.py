"""Saves a checkpoint by all ranks, in the main thread or in another thread while training goes on.

    main thread   rank 0 begins a draft and broadcasts its folder -> [copy into staging memory]
    either        every rank writes its files -> rank 0 joins the tables, publishes the draft, prunes

The newest checkpoint that `directory.find` returns is whole at every moment. If one rank fails, all ranks raise, and
earlier checkpoints are unchanged.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.checkpoint import directory, jsonfile
from zeroshard.checkpoint.audit import Act, begin_log, record
from zeroshard.checkpoint.draft import Draft, begin, draft_folder, write_manifest
from zeroshard.checkpoint.dtypes import name_of
from zeroshard.checkpoint.encryption import Encryption, new_encryption, open_encryption
from zeroshard.checkpoint.error_barrier import CollectiveBarrier, ErrorBarrier, StoreBarrier, on_all_ranks
from zeroshard.checkpoint.keys import KeyService
from zeroshard.checkpoint.manifest import check_name
from zeroshard.checkpoint.remote import Remote
from zeroshard.checkpoint.signature import Signing, sign
from zeroshard.checkpoint.staging import Staging
from zeroshard.checkpoint.writer import Piece, join_tables, write_pieces
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.watchdog import Watchdog
from zeroshard.errors import CheckpointError, ZeroShardError

_LOGGER = logging.getLogger("zeroshard")
SAVING_THREAD = "checkpoint "
"""Prefix of the names of threads that write checkpoints; the launcher waits for these, even if a rank has failed."""
_MAX_STATE_NBYTES = jsonfile.MAX_BYTES // 4
_UNCHANGED = "; the checkpoints that were there are unchanged"
_NOT_COPIED = "; it is whole on disk"


@dataclass(frozen=True)
class Request:
    """One checkpoint to be saved, as one rank sees it.

    Attributes:
        pieces: what this rank writes; those of all ranks have each tensor's elements exactly once.
        aliases, state: JSON values, equal on all ranks (rank 0's are written).
        rank_state: JSON values of this rank.
        latest: whether it becomes the newest.
        keep: how many checkpoints stay in the directory; None for all.
        service: has the key that encrypts it; None for no encryption.
        audit: start the log of the directory (see `audit`); an existing log is continued anyway.
        remote: the store that it is copied to when it is whole; None for none.
        signing: how it is signed; None, on all ranks, for no signature.
    """

    base: Path
    tag: str
    pieces: Sequence[Piece]
    aliases: Mapping[str, str]
    state: Mapping[str, Any]
    rank_state: Mapping[str, Any]
    latest: bool = True
    keep: int | None = None
    service: KeyService | None = None
    audit: bool = False
    remote: Remote | None = None
    signing: Signing | None = None

    @property
    def final(self) -> Path:
        return self.base / self.tag

    def check(self) -> None:
        """Raises CheckpointError for content that could be written but not read again."""
        for piece in self.pieces:
            check_name(piece.info.name)
            name_of(piece.info.dtype, piece.info.name)
        for alias in self.aliases:
            check_name(alias)
        for what in (self.state, self.rank_state):
            try:
                nbytes = len(jsonfile.canonical(what))
            except (ValueError, TypeError) as error:
                raise CheckpointError(f"checkpoint {self.final}: its state can't be kept in JSON: {error}") from error
            if nbytes > _MAX_STATE_NBYTES:
                raise CheckpointError(
                    f"checkpoint {self.final}: what is to be kept beside tensors has {nbytes} bytes as JSON, more than "
                    f"{_MAX_STATE_NBYTES}; keep less in client_state"
                )


class Saver:
    """Saves the checkpoints of one run, one after the other. All methods are called by all ranks.

    Args:
        control: the communicator of all ranks that save.
        store: their store; None for a single rank.
        device: the device that has the state.
    """

    def __init__(
        self, control: Collectives, store: dist.Store | None, watchdog: Watchdog, device: torch.device
    ) -> None:
        self._barrier = CollectiveBarrier(control, device)
        self._store, self._watchdog = store, watchdog
        self._staging = Staging(device)
        self._count = 0
        self._running: threading.Thread | None = None
        self._problem: ZeroShardError | None = None

    @property
    def staging_nbytes(self) -> int:
        """Host bytes of the copy that asynchronous saves make."""
        return self._staging.nbytes

    def barrier(self) -> CollectiveBarrier:
        """The barrier of the main threads of all ranks, for loads."""
        return self._barrier

    def save(self, request: Request, *, background: bool) -> None:
        """Save now, or copy now and write in a thread. Call `wait` for the previous save before.

        Raises:
            CheckpointError: it failed, here or on another rank.
        """
        first = self._barrier.rank == 0
        base, tag, final = request.base, request.tag, request.final
        key = None if request.service is None else request.service.id
        signed = request.signing is not None
        if not self._barrier.all_equal(f"{tag} {request.latest} {request.keep} {background} {key} {signed}"):
            raise CheckpointError(
                f"checkpoint {final}: the ranks do not agree on tag, save_latest, keep, async, key, and on whether it "
                f"is signed (this rank: tag {tag!r}, {request.latest}, {request.keep}, {background}, {key}, "
                f"{signed}); give all the same"
            )
        with ExitStack() as undo:
            draft = on_all_ranks(
                self._barrier, lambda: begin(base, tag, latest=request.latest) if first else None, final
            )
            if draft is not None:
                undo.callback(draft.close)
            folder = draft_folder(
                base, tag, self._barrier.broadcast_text(draft.owner.id if draft is not None else "", 0)
            )
            writing = _Writing(request, folder, draft, self._agreed_encryption(request))
            if not background:
                writing.run(self._barrier)
                return
            self._count += 1
            staged, barrier = on_all_ranks(self._barrier, lambda: self._staged(writing), final, _UNCHANGED)
            thread = threading.Thread(
                target=self._in_thread, args=(staged, barrier), name=f"{SAVING_THREAD}{tag}", daemon=False
            )
            try:
                thread.start()
            except RuntimeError as error:  # the other ranks' threads have begun
                barrier.first_failure(str(error))
                raise CheckpointError(f"checkpoint {final}: {error}") from error
            self._running = thread
            undo.pop_all()

    def _agreed_encryption(self, request: Request) -> Encryption | None:
        """The encryption that rank 0 makes; other ranks open its header by their key service."""
        service, first = request.service, self._barrier.rank == 0
        if service is None:
            return None
        own = on_all_ranks(self._barrier, lambda: new_encryption(service) if first else None, request.final, _UNCHANGED)
        header = self._barrier.broadcast_text("" if own is None else json.dumps(own.header()), 0)
        return on_all_ranks(
            self._barrier,
            lambda: own or open_encryption(json.loads(header), service, request.final),
            request.final,
            _UNCHANGED,
        )

    def _staged(self, writing: _Writing) -> tuple[_Writing, StoreBarrier]:
        """The same with a copy of the state, and the barrier of the threads of all ranks."""
        request = writing.request
        barrier = StoreBarrier(self._store, self._barrier.rank, self._barrier.size, str(self._count), self._watchdog)
        return replace(writing, request=replace(request, pieces=self._staging.copy(request.pieces))), barrier

    def wait(self) -> None:
        """Wait for an asynchronous save to end. Raises CheckpointError if it or an earlier one failed."""
        if self._running is not None:
            self._running.join()
            self._running = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise CheckpointError(f"an asynchronous save failed: {problem}") from problem

    def close(self) -> None:
        """Wait for an asynchronous save, log its failure if there is one, and free the staging memory."""
        try:
            self.wait()
        except CheckpointError as error:
            _LOGGER.error("%s", error)
        self._staging.close()

    def _in_thread(self, writing: _Writing, barrier: ErrorBarrier) -> None:
        try:
            writing.run(barrier)
        except (ZeroShardError, RuntimeError) as error:  # RuntimeError: the store is gone with its process
            self._problem = CheckpointError(str(error))
            _LOGGER.error("asynchronous save of %s failed: %s", writing.request.final, error)
        finally:
            if writing.draft is not None:
                writing.draft.close()


@dataclass(frozen=True)
class _Writing:
    """A checkpoint that all ranks write into `folder`; `draft` is None except on rank 0."""

    request: Request
    folder: Path
    draft: Draft | None
    encryption: Encryption | None

    def run(self, barrier: ErrorBarrier) -> None:
        """Write this rank's part; rank 0 publishes the checkpoint. Called by all ranks."""
        request = self.request
        on_all_ranks(
            barrier,
            lambda: write_pieces(
                self.folder,
                barrier.rank,
                request.pieces,
                request.rank_state,
                self.encryption,
                digests=request.signing is not None,
            ),
            request.final,
            _UNCHANGED,
        )
        on_all_ranks(barrier, lambda: self._finish(barrier.size), request.final, _UNCHANGED)
        if (remote := request.remote) is not None:
            on_all_ranks(barrier, lambda: remote.put_files(request.final, barrier.rank), request.final, _NOT_COPIED)
            on_all_ranks(barrier, lambda: self._finish_remote(remote), request.final, _NOT_COPIED)

    def _finish_remote(self, remote: Remote) -> None:
        if self.draft is not None:
            remote.finish(self.request.final, latest=self.request.latest, keep=self.request.keep)

    def _finish(self, ranks: int) -> None:
        request, draft = self.request, self.draft
        if draft is None:
            return
        manifest = join_tables(self.folder, ranks, request.aliases, request.state, self.encryption)
        write_manifest(draft, manifest)
        if request.signing is not None and request.signing.signer is not None:
            sign(self.folder, request.signing.signer, {name: info.digest for name, info in manifest.files.items()})
        if request.audit:
            begin_log(request.base)
        draft.publish(latest=request.latest)
        record(request.base, Act.SAVE, request.tag)
        if request.keep is not None:
            try:
                for tag in directory.prune(request.base, request.keep, protect=request.tag):
                    record(request.base, Act.DELETE, tag, "")
            except OSError as error:
                _LOGGER.warning("checkpoint %s is whole, but older ones can't be removed: %s", request.final, error)

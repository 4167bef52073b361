"""Copies checkpoints to an object store (such as S3), through fsspec, and fetches the newest one from there.

    URL/TAG/model-00003-0.safetensors   each rank copies the files that it has written
    URL/TAG/checkpoint.json             rank 0 copies it last; with it the checkpoint is complete
    URL/latest                          the tag of the newest one

An object store has no rename, so a checkpoint is complete if its table is there: the table is written after all other
files, and removed before them. Rejected: saving to the store directly, which loses a checkpoint with every failure of
the network, and lets training wait for the network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.directory import HOLD, LATEST, SIGNATURE, check_tag
from zeroshard.checkpoint.manifest import MANIFEST, OWN_FILE
from zeroshard.checkpoint.temporary_files import delete, new_id, temporary_path
from zeroshard.errors import CheckpointError, UsageError

_ORDER = "order"


@dataclass(frozen=True)
class Remote:
    """The folder `url` of a store. Raises UsageError if fsspec, or its package for the store, is not installed."""

    url: str

    def __post_init__(self) -> None:
        self._opened()

    def put_files(self, folder: Path, rank: int) -> None:
        """Copy the files of a checkpoint that a rank has written. Raises CheckpointError if that fails."""
        store, base = self._opened()
        with self._naming_errors(folder.name):
            for path in sorted(folder.glob(f"*-{rank:05d}-*.safetensors")):
                store.makedirs(f"{base}/{folder.name}", exist_ok=True)
                store.put_file(str(path), f"{base}/{folder.name}/{path.name}")

    def finish(self, folder: Path, *, latest: bool, keep: int | None) -> None:
        """Copy signature and table, write `latest` if wanted, and remove all but the newest `keep`.

        Raises:
            CheckpointError: the store can't be written.
        """
        store, base = self._opened()
        with self._naming_errors(folder.name):
            for name in (HOLD, SIGNATURE, MANIFEST):
                if (folder / name).is_file():
                    store.put_file(str(folder / name), f"{base}/{folder.name}/{name}")
            if latest:
                store.pipe_file(f"{base}/{LATEST}", folder.name.encode())
            if keep is not None:
                self._prune(keep, folder.name)

    def tags(self) -> list[str]:
        """Tags of the checkpoints in the store, oldest first. Raises CheckpointError if it can't be read."""
        store, base = self._opened()
        with self._naming_errors("the list"):
            if not store.exists(base):
                return []
            found = [str(path).rstrip("/").rpartition("/")[2] for path in store.ls(base, detail=False)]
            whole = [tag for tag in found if store.exists(f"{base}/{tag}/{MANIFEST}")]
            return sorted(whole, key=lambda tag: (self._order(tag), tag))

    def fetch_newest(self, directory: Path) -> str | None:
        """Copy the newest checkpoint into a directory that has none; returns its tag, None if there is none.

        Raises:
            CheckpointError: it can't be read or written; the directory is unchanged.
        """
        tags = self.tags()
        if not tags:
            return None
        store, base = self._opened()
        tag = tags[-1]
        with self._naming_errors(tag):
            if store.exists(f"{base}/{LATEST}"):
                named = store.cat_file(f"{base}/{LATEST}").decode().strip()
                tag = named if named in tags else tag
            check_tag(tag)
            directory.mkdir(parents=True, exist_ok=True)
            partial = temporary_path(directory, tag, new_id(), "partial")
            partial.mkdir()
            try:
                for path in store.ls(f"{base}/{tag}", detail=False):
                    name = str(path).rpartition("/")[2]
                    if name in (MANIFEST, SIGNATURE, HOLD) or OWN_FILE.fullmatch(name):
                        store.get_file(path, str(partial / name))
                os.rename(partial, directory / tag)
            finally:
                with suppress(FileNotFoundError):
                    delete(partial)
            (directory / LATEST).write_text(tag)
        return tag

    def _prune(self, keep: int, newest: str) -> None:
        store, base = self._opened()
        for tag in self.tags()[:-keep]:
            if tag == newest or store.exists(f"{base}/{tag}/{HOLD}"):
                continue
            store.rm_file(f"{base}/{tag}/{MANIFEST}")
            store.rm(f"{base}/{tag}", recursive=True)

    def _order(self, tag: str) -> int:
        store, base = self._opened()
        try:
            return int(json.loads(store.cat_file(f"{base}/{tag}/{MANIFEST}")).get(_ORDER, 0))
        except (ValueError, AttributeError, TypeError):
            return 0

    def _opened(self) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise UsageError(f"checkpoint.remote {self.url}: needs fsspec (pip install fsspec)") from error
        try:
            store, path = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UsageError(f"checkpoint.remote {self.url}: {error}") from error
        return store, path.rstrip("/")

    @contextmanager
    def _naming_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.url}: {what}: {type(error).__name__} {error}") from error

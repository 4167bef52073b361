"""Makes the folder of an export as a whole, by one rename, and never replaces another folder.

In a folder that has other files, or that several ranks export to, single files are renamed instead, the index last, so
that several writers of the same content do no harm.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from zeroshard.checkpoint.temporary_files import Owner, clear, delete
from zeroshard.errors import CheckpointError, UsageError

WEIGHTS = ("model", "pytorch_model")
"""Prefixes of the names of files with weights and of their index."""


def refuse_occupied(target: Path) -> None:
    """Raises UsageError unless `target` does not exist or is an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not empty; give the export a folder of its own")


@contextmanager
def new_folder(target: Path, *, shared: bool = False) -> Iterator[Path]:
    """A folder beside `target` to write into, which is renamed to it at the end. Raises CheckpointError if that fails.

    Args:
        shared: `target` may have files, or get them meanwhile; files that are no weights are kept.
    """
    try:
        with closing(Owner(target.parent)) as owner:
            clear(target.parent)
            partial = owner.path(target.name)
            try:
                partial.mkdir()
                yield partial
                _put(partial, target, shared)
            finally:
                delete(partial)
    except OSError as error:
        raise CheckpointError(f"{target} can't be written: {error}") from error


def _put(partial: Path, target: Path, shared: bool) -> None:
    try:
        with suppress(FileNotFoundError):
            target.rmdir()
        partial.rename(target)
    except OSError as error:
        if not shared or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        for file in sorted(partial.iterdir(), key=lambda file: file.name.endswith(".index.json")):
            if file.name.startswith(WEIGHTS) or not (target / file.name).exists():
                file.replace(target / file.name)

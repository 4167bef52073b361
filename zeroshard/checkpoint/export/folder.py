"""The folder of an export: it is there whole or not at all, and never over something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from zeroshard.checkpoint.owned import Owner, clear, delete
from zeroshard.errors import CheckpointError, UsageError


def refuse_occupied(target: Path) -> None:
    """Raises UsageError unless `target` is free or an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not empty; give the export a folder of its own")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into, which becomes it at the end. Raises CheckpointError where it can't."""
    try:
        with closing(Owner(target.parent)) as owner:
            clear(target.parent)
            partial = owner.path(target.name)
            try:
                partial.mkdir()
                yield partial
                if target.exists():
                    target.rmdir()
                partial.rename(target)
            finally:
                delete(partial)
    except OSError as error:
        raise CheckpointError(f"{target} can't be written: {error}") from error

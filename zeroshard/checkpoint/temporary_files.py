"""Names for files and folders that one process writes, which no other process uses.

    DIR/.OWNER.lock           locked by the writer; the kernel releases the lock when its process dies
    DIR/.NAME.OWNER.partial   will be NAME when it is whole
    DIR/.NAME.OWNER.old       what NAME replaces, until NAME is there
    DIR/.NAME.OWNER.removed   is being deleted

OWNER is random, so the files of two jobs in one directory are never mixed. An owner whose lock is not held is dead, and
the next writer removes its files. On a file system without locks every other owner counts as dead; a job whose files
another job removes gets an error, but no mixed files. Rejected: one lock for the directory, which a process that hangs
on another host would keep forever.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOGGER = logging.getLogger("zeroshard")
_ID = r"[0-9a-f]{16}"
_LOCK = re.compile(rf"\.(?P<owner>{_ID})\.lock")
_TEMPORARY = re.compile(rf"\.(?P<name>.+)\.(?P<owner>{_ID})\.(?P<what>partial|old|removed)")
_CREATE = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def new_id() -> str:
    """A random id of an owner, 16 hexadecimal digits."""
    return secrets.token_hex(8)


def temporary_path(base: Path, name: str, owner: str, what: str) -> Path:
    """The path of `name` that `owner` has as "partial", "old" or "removed"."""
    return base / f".{name}.{owner}.{what}"


def final_name(path: Path, what: str) -> str | None:
    """The name of which `path` is an owner's "partial", "old" or "removed"; None for other paths."""
    match = _TEMPORARY.fullmatch(path.name)
    return match["name"] if match and match["what"] == what else None


class Owner:
    """A writer in a directory, whose lock is held until it is closed.

    Raises:
        OSError: the directory can't be made or written to.
    """

    def __init__(self, base: Path) -> None:
        try:
            base.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise OSError(
                error.errno, "it is no directory (but a file, or a link that leads to none)", str(base)
            ) from error
        self._base = base
        self._descriptor = -1
        while self._descriptor < 0:
            self.id = new_id()
            self._descriptor = self._locked()

    def _locked(self) -> int:
        """The descriptor of the lock; negative if another writer removed the file before it was locked."""
        descriptor = os.open(self._lock, os.O_RDWR | _CREATE, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return -1
        except OSError:  # no locks here
            return descriptor
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return -1
        return descriptor

    @property
    def _lock(self) -> Path:
        return _lock_of(self._base, self.id)

    def path(self, name: str, what: str = "partial") -> Path:
        """A path that only this owner uses."""
        return temporary_path(self._base, name, self.id, what)

    def close(self) -> None:
        """Release the lock. Files of this owner that are left are removed by the next writer."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._lock.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def clear(base: Path, superseded: Callable[[Path, str], bool] = lambda old, name: True) -> list[str]:
    """Remove the files of dead owners in a directory; returns the names that other owners are writing.

    Args:
        superseded: whether an "old" (its path, its name) is no longer needed.
    """
    left: dict[str, list[Path]] = {}
    for path in sorted(base.iterdir()):  # before calls of `superseded`, so that later "old" paths are not in the list
        match = _TEMPORARY.fullmatch(path.name) or _LOCK.fullmatch(path.name)
        if match:
            left.setdefault(match["owner"], []).append(path)
    busy: list[str] = []
    for owner, paths in left.items():
        descriptor = _take(_lock_of(base, owner))
        if descriptor is None:
            busy += [name for name in (final_name(path, "partial") for path in paths) if name is not None]
            continue
        for path in paths:
            name = final_name(path, "old")
            if not _LOCK.fullmatch(path.name) and (name is None or superseded(path, name)):
                delete(path)
        with suppress(OSError):
            _lock_of(base, owner).unlink(missing_ok=True)
        if descriptor >= 0:
            os.close(descriptor)
    return busy


def _lock_of(base: Path, owner: str) -> Path:
    return base / f".{owner}.lock"


def _take(lock: Path) -> int | None:
    """The descriptor of a dead owner's lock, which is now held (-1: there is no file); None for a living owner."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return -1
    except OSError:  # another user's file, or no lock file
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # no locks here
        pass
    return descriptor


def delete(path: Path) -> None:
    """Delete a file, a folder or a link. What can't be deleted is logged."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:  # another process deletes it too
        pass
    except OSError as error:
        _LOGGER.warning("%s is needed no more but can't be removed: %s", path, error.strerror)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """A context whose OSErrors name the file, which those of writes to an open file do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error


def write_synced(file: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk. Raises OSError, also if the name exists."""
    with naming(file), open(os.open(file, os.O_WRONLY | _CREATE, 0o666), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

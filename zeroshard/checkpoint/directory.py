"""Finds the checkpoints of a directory, the newest of them, and those to remove.

    DIR/TAG                  a whole checkpoint: it got its name when all of it was on the disk
    DIR/latest               the tag of the newest one, for people and other tools
    DIR/.TAG.OWNER.partial   one that is being written, or was when its writer was killed; the next save removes it
    DIR/.TAG.OTHER.old       the checkpoint that TAG replaces, until TAG is there; if the writer is killed before that,
                             it is found under TAG

How a checkpoint is written is described in `draft`. Each checkpoint records its place in their order; the times of
files change with clocks and copies. Links are followed for reads, never for removals.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeroshard.checkpoint.manifest import FORMAT, MANIFEST, MAX_ORDER, OWN_FILE
from zeroshard.checkpoint.temporary_files import delete, final_name, new_id, sync_folder, temporary_path
from zeroshard.errors import CheckpointError, ZeroShardWarning

LATEST = "latest"
HOLD = "hold.json"
"""In the folder of a checkpoint that must be kept (see `hold`)."""
SIGNATURE = "signature.json"
"""In the folder of a checkpoint that was signed (see `signature`)."""
_ORDER = re.compile(rb'"order": ([0-9]{1,19}),')
_HEAD_NBYTES = 512
_ATTEMPTS = 50
_LONGEST_TAG = 201
_TAG = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST_TAG - 1}}}")


@dataclass(frozen=True)
class Found:
    """A whole checkpoint; `order` grows with each save."""

    tag: str
    folder: Path
    order: int


def check_tag(tag: str) -> None:
    """Raises CheckpointError for a tag that can't be the name of a folder."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST:
        shown = repr(tag) if len(str(tag)) <= _LONGEST_TAG else f"{str(tag)[:40]!r}... of {len(str(tag))} characters"
        raise CheckpointError(
            f"checkpoint tag {shown}: use letters, digits, '.', '_' and '-' only, a letter or digit first, at most "
            f"{_LONGEST_TAG} of them, and not {LATEST!r}"
        )


def check_place(folder: Path) -> None:
    """Raises CheckpointError if a new checkpoint would replace a held one, or something that is no checkpoint."""
    if is_held(folder):
        raise CheckpointError(
            f"checkpoint {folder} is held ({folder / HOLD}) and stays; save under another tag, or release it with "
            f"`zeroshard checkpoint release {folder}`"
        )
    for _ in range(_ATTEMPTS):  # another job may be replacing it at the same time
        if not os.path.lexists(folder) or _is_ours(folder):
            return
    raise CheckpointError(
        f"checkpoint {folder}: something that is no checkpoint of zeroshard has this name; it was left as it is. "
        "Move it away, or give another tag or directory"
    )


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a checkpoint, damaged or not, or what a killed process has left of one."""
    try:
        head = _head(folder)
    except FileNotFoundError:
        head = b""
    except OSError:
        return False
    if head.strip(b"\0"):
        return FORMAT.encode() in head
    try:
        return all(name in (MANIFEST, SIGNATURE) or OWN_FILE.fullmatch(name) for name in os.listdir(folder))
    except OSError:
        return False


def is_held(folder: Path) -> bool:
    """Whether a checkpoint is held."""
    return os.path.lexists(folder / HOLD)


def is_whole(folder: Path) -> bool:
    """Whether a folder is a checkpoint that was written to its end."""
    return (folder / MANIFEST).is_file()


def find(directory: str | os.PathLike[str], tag: str | None = None) -> Path:
    """The folder of the checkpoint `tag`, or of the newest one. Raises CheckpointError if there is none.

    The newest is the one that `latest` names. If there is no `latest` (after saves with save_latest=False), or, with a
    ZeroShardWarning, if it names no checkpoint, the newest is the one saved last.
    """
    base = Path(directory)
    if tag is None:
        named = newest(base)
        if named.problem is not None:
            warnings.warn(f"{named.problem}; {named.tag} is taken", ZeroShardWarning, stacklevel=2)
        tag = named.tag
    check_tag(tag)
    if is_whole(base / tag):
        return base / tag
    there = whole(base)
    for found in there:  # a save that replaces it has renamed it
        if found.tag == tag:
            return found.folder
    known = ", ".join(found.tag for found in there) or "none"
    raise CheckpointError(
        f"there is no checkpoint {tag!r} in {base} (no file {base / tag / MANIFEST}); those that are there: {known}"
    )


@dataclass(frozen=True)
class Newest:
    """The tag of the newest checkpoint; `problem` says why `latest` does not name it, if that is wrong."""

    tag: str
    problem: str | None = None


def newest(base: Path) -> Newest:
    """The checkpoint that `latest` names, else the one saved last. Raises CheckpointError if there is none."""
    text, problem = _read_latest(base)
    there = whole(base)
    for _ in range(_ATTEMPTS):  # another job may save and prune at the same time
        if text in {found.tag for found in there}:
            return Newest(text)
        before = text
        text, problem = _read_latest(base)
        if text == before:
            break
        there = whole(base)
    if not there:
        raise CheckpointError(f"{base} holds no finished checkpoint" + (f"; {problem}" if problem else ""))
    return Newest(there[-1].tag, problem)


def _read_latest(base: Path) -> tuple[str, str | None]:
    """The content of `latest`, and what is wrong with it if no checkpoint has that tag."""
    pointer = base / LATEST
    try:
        text = _begin_of(pointer, 1024).decode(errors="replace").strip()
    except FileNotFoundError:
        return "", None
    except OSError as error:
        return "", f"{pointer} can't be read ({error.strerror})"
    return text, f"{pointer} names {text[:80]!r}, which is no checkpoint there"


def whole(directory: str | os.PathLike[str]) -> list[Found]:
    """All whole checkpoints of a directory, oldest first."""
    base = Path(directory)
    found: dict[str, Found] = {}
    there: list[Found] = []
    for _ in range(_ATTEMPTS):
        names = _names(base)
        there = list(_whole(base, names))
        if names == _names(base):  # a listing may miss folders that are renamed meanwhile
            break
    for one in sorted(there, key=lambda one: (one.folder.name == one.tag, one.order)):
        found[one.tag] = one  # the last one counts: TAG itself, else the newest of those that it was to replace
    return sorted(found.values(), key=lambda one: (one.order, one.tag))


def _names(base: Path) -> set[str]:
    try:
        return set(os.listdir(base))
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _whole(base: Path, names: set[str]) -> Iterator[Found]:
    for name in names:
        tag = final_name(base / name, "old") or name
        if _TAG.fullmatch(tag) and tag != LATEST:
            try:
                yield Found(tag, base / name, _order(base / name))
            except OSError:  # no checkpoint
                continue


def _order(folder: Path) -> int:
    """The recorded place in the order of saves, a time in ns; the time of the file if none is recorded."""
    match = _ORDER.search(_head(folder))
    order = int(match[1]) if match else 0
    return order if 0 < order < MAX_ORDER else os.stat(folder / MANIFEST).st_mtime_ns


def _head(folder: Path) -> bytes:
    """The first bytes of `checkpoint.json`. Raises OSError if it is missing or no plain file."""
    return _begin_of(folder / MANIFEST, _HEAD_NBYTES)


def _begin_of(file: Path, nbytes: int) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no plain file")
        return os.pread(descriptor, nbytes, 0)
    finally:
        os.close(descriptor)


def next_order(base: Path) -> int:
    """The place of a new checkpoint in the order of saves: the time in ns, or more if the clock was set back."""
    return max(time.time_ns(), *(found.order + 1 for found in whole(base)), 1)


def prunable(base: Path, keep: int, *, protect: str | None = None) -> list[Found]:
    """All but the newest `keep` checkpoints, oldest first, but `protect`, what `latest` names, and held ones."""
    there = whole(base)
    if not there:
        return []
    kept = {protect, newest(base).tag, *(found.tag for found in there[max(0, len(there) - keep) :])}
    return [found for found in there if found.tag not in kept and not is_held(found.folder)]


def prune(base: Path, keep: int, *, protect: str | None = None) -> list[str]:
    """Remove the `prunable` checkpoints; returns their tags. Raises OSError if one can't be removed."""
    removed = prunable(base, keep, protect=protect)
    for found in removed:
        remove(found)
    return [found.tag for found in removed]


def remove(found: Found) -> None:
    """Remove a checkpoint, or a link to one, by a rename first, so that no part of it is found. Raises OSError.

    A checkpoint that another job has saved under its tag meanwhile is kept.
    """
    base = found.folder.parent
    going = temporary_path(base, found.tag, new_id(), "removed")
    try:
        found.folder.rename(going)
        if _order(going) != found.order:
            with suppress(OSError):  # fails if a third job's is there by now
                going.rename(found.folder)
                return
    except FileNotFoundError:  # another process removes it too
        return
    sync_folder(base)
    delete(going)

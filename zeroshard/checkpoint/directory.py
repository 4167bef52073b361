"""A directory of checkpoints: which there are, which is the newest, and which ones are removed.

    DIR/TAG                  a checkpoint that is whole: it got its name when all of it was on the disk
    DIR/latest               the tag of the newest one, for people and for other tools
    DIR/.TAG.OWNER.partial   one that is being written, or was when its writer was killed; the next save removes it
    DIR/.TAG.OTHER.old       what TAG replaces, until TAG is there; found under TAG if the writer was killed just then

How one is written is in `draft`. Their order is recorded in each: file times are those of a clock that may be set back,
or of a copy. Links are followed to read, never to remove.
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
_ORDER = re.compile(rb'"order": ([0-9]{1,19}),')
_HEAD_NBYTES = 512
_LOOKS = 50
_LONGEST_TAG = 201
_TAG = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST_TAG - 1}}}")


@dataclass(frozen=True)
class Found:
    """A whole checkpoint; `order` grows with each save."""

    tag: str
    folder: Path
    order: int


def check_tag(tag: str) -> None:
    """A tag becomes a folder's name, so it must be a plain one. Raises CheckpointError."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST:
        shown = repr(tag) if len(str(tag)) <= _LONGEST_TAG else f"{str(tag)[:40]!r}... of {len(str(tag))} characters"
        raise CheckpointError(
            f"checkpoint tag {shown}: use letters, digits, '.', '_' and '-' only, a letter or digit first, at most "
            f"{_LONGEST_TAG} of them, and not {LATEST!r}"
        )


def check_place(folder: Path) -> None:
    """Raises CheckpointError where a new checkpoint would take the place of something that is none of ours."""
    if is_held(folder):
        raise CheckpointError(
            f"checkpoint {folder} is held ({folder / HOLD}) and stays; save under another tag, or release it with "
            f"`zeroshard checkpoint release {folder}`"
        )
    for _ in range(_LOOKS):  # another job may be replacing it just then
        if not os.path.lexists(folder) or _is_ours(folder):
            return
    raise CheckpointError(
        f"checkpoint {folder}: something that is no checkpoint of zeroshard has this name; it was left as it is. "
        "Move it away, or give another tag or directory"
    )


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a checkpoint, damaged or not, or what a kill has left of one."""
    try:
        head = _head(folder)
    except FileNotFoundError:
        head = b""
    except OSError:
        return False
    if head.strip(b"\0"):
        return FORMAT.encode() in head
    try:
        return all(name == MANIFEST or OWN_FILE.fullmatch(name) for name in os.listdir(folder))
    except OSError:
        return False


def is_held(folder: Path) -> bool:
    """Whether a checkpoint must be kept."""
    return os.path.lexists(folder / HOLD)


def is_whole(folder: Path) -> bool:
    """Whether a folder is a checkpoint of which everything was written."""
    return (folder / MANIFEST).is_file()


def find(directory: str | os.PathLike[str], tag: str | None = None) -> Path:
    """The folder of a checkpoint: that of `tag`, or the newest. Raises CheckpointError when there is none.

    Without `latest` (a save with save_latest=False) the newest is the last one saved; a `latest` that names nothing is
    passed over with a ZeroShardWarning.
    """
    base = Path(directory)
    if tag is None:
        named = newest(base)
        if named.passed_over is not None:
            warnings.warn(f"{named.passed_over}; {named.tag} is taken", ZeroShardWarning, stacklevel=2)
        tag = named.tag
    check_tag(tag)
    if is_whole(base / tag):
        return base / tag
    there = whole(base)
    for found in there:  # while TAG is replaced it has another name
        if found.tag == tag:
            return found.folder
    known = ", ".join(found.tag for found in there) or "none"
    raise CheckpointError(
        f"there is no checkpoint {tag!r} in {base} (no file {base / tag / MANIFEST}); those that are there: {known}"
    )


@dataclass(frozen=True)
class Newest:
    """Which checkpoint is the newest; `passed_over` says what is wrong with `latest` where that does not name it."""

    tag: str
    passed_over: str | None = None


def newest(base: Path) -> Newest:
    """What `latest` names, or where there is no `latest` the last one saved. CheckpointError when there is none."""
    text, problem = _said(base)
    there = whole(base)
    for _ in range(_LOOKS):  # another job may save and prune just then
        if text in {found.tag for found in there}:
            return Newest(text)
        before = text
        text, problem = _said(base)
        if text == before:
            break
        there = whole(base)
    if not there:
        raise CheckpointError(f"{base} holds no finished checkpoint" + (f"; {problem}" if problem else ""))
    return Newest(there[-1].tag, problem)


def _said(base: Path) -> tuple[str, str | None]:
    """What `latest` says, and what is wrong with it if that is no checkpoint's tag."""
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
    for _ in range(_LOOKS):
        names = _names(base)
        there = list(_whole(base, names))
        if names == _names(base):  # a listing may miss what is renamed meanwhile
            break
    for one in sorted(there, key=lambda one: (one.folder.name == one.tag, one.order)):
        found[one.tag] = one  # the last counts: TAG itself, else the newest of what TAG was to take the place of
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
    """The recorded place in the order of saves, which is a time; that of the file where none is recorded."""
    match = _ORDER.search(_head(folder))
    order = int(match[1]) if match else 0
    return order if 0 < order < MAX_ORDER else os.stat(folder / MANIFEST).st_mtime_ns


def _head(folder: Path) -> bytes:
    """How `checkpoint.json` begins. OSError where it is missing or no plain file."""
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
    """The place of a new checkpoint in the order of saves: the time in ns, or later if the clock was set back."""
    return max(time.time_ns(), *(found.order + 1 for found in whole(base)), 1)


def prunable(base: Path, keep: int, *, protect: str | None = None) -> list[Found]:
    """All but the newest `keep` checkpoints, oldest first, without `protect`, what `latest` names and what is held."""
    there = whole(base)
    if not there:
        return []
    kept = {protect, newest(base).tag, *(found.tag for found in there[max(0, len(there) - keep) :])}
    return [found for found in there if found.tag not in kept and not is_held(found.folder)]


def prune(base: Path, keep: int, *, protect: str | None = None) -> list[str]:
    """Remove the `prunable` checkpoints; returns their tags. OSError where one can't be removed."""
    removed = prunable(base, keep, protect=protect)
    for found in removed:
        remove(found)
    return [found.tag for found in removed]


def remove(found: Found) -> None:
    """Remove a checkpoint, of a link the link alone; from the first moment on it is no checkpoint any more. OSError.

    One that another job has saved under its tag since stays.
    """
    base = found.folder.parent
    going = temporary_path(base, found.tag, new_id(), "removed")
    try:
        found.folder.rename(going)
        if _order(going) != found.order:
            with suppress(OSError):  # where a third one is there by now this one would be replaced
                going.rename(found.folder)
                return
    except FileNotFoundError:  # another process removes it too
        return
    sync_folder(base)
    delete(going)

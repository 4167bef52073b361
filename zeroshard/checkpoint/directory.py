"""A directory of checkpoints: which there are, which is the newest, and how one takes its place without being half.

    DIR/TAG            a checkpoint that is whole: it got its name when all of it was on the disk
    DIR/latest         the tag of the newest one, for people and for other tools
    DIR/.TAG.partial   one that is being written, or was when its writer was killed; the next save removes it
    DIR/.TAG.old       the one that TAG replaces, until TAG is there; found under TAG if the writer was killed just then

Each step is one rename, and each is preceded by an fsync of what it names, so a crash of the machine is a kill too.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.errors import CheckpointError

LATEST = "latest"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True)
class Found:
    """A whole checkpoint; `order` grows with the time at which it was finished."""

    tag: str
    folder: Path
    order: int


def check_tag(tag: str) -> None:
    """A tag becomes a folder's name, so it must be a plain one. Raises CheckpointError."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST:
        raise CheckpointError(f"checkpoint tag {tag!r}: use letters, digits, '.', '_' and '-' only")


def partial_folder(base: Path, tag: str) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return base / f".{tag}.partial"


def old_folder(base: Path, tag: str) -> Path:
    """Where a checkpoint is while another takes its place; it stays there if the process is killed just then."""
    return base / f".{tag}.old"


def find(directory: str | os.PathLike[str], tag: str | None = None) -> Path:
    """The folder of a checkpoint: that of `tag`, or the newest. Raises CheckpointError when there is none.

    Without `latest` (a save with save_latest=False, a kill between two renames) the newest one is found by its time.
    """
    base = Path(directory)
    if tag is None:
        tag = _latest_tag(base)
    check_tag(tag)
    for folder in (base / tag, old_folder(base, tag)):
        if (folder / MANIFEST).is_file():
            return folder
    known = ", ".join(found.tag for found in whole(base)) or "none"
    raise CheckpointError(
        f"there is no checkpoint {tag!r} in {base} (no file {base / tag / MANIFEST}); those that are there: {known}"
    )


def _latest_tag(base: Path) -> str:
    try:
        with (base / LATEST).open("rb") as file:
            text = file.read(1024).decode(errors="replace").strip()
    except OSError:
        text = ""
    if _TAG.fullmatch(text) and any((f / MANIFEST).is_file() for f in (base / text, old_folder(base, text))):
        return text
    there = whole(base)
    if not there:
        raise CheckpointError(f"{base} holds no finished checkpoint (there is no file {LATEST!r} in it)")
    return there[-1].tag


def whole(directory: str | os.PathLike[str]) -> list[Found]:
    """All whole checkpoints of a directory, oldest first."""
    return sorted(_whole(Path(directory)), key=lambda found: (found.order, found.tag))


def _whole(base: Path) -> Iterator[Found]:
    if not base.is_dir():
        return
    for folder in base.iterdir():
        name = folder.name
        tag = name[1:-4] if name.startswith(".") and name.endswith(".old") else name
        if not _TAG.fullmatch(tag) or (tag != name and (base / tag / MANIFEST).is_file()):
            continue
        try:
            order = os.stat(folder / MANIFEST).st_mtime_ns
        except OSError:
            continue
        yield Found(tag, folder, order)


def begin(base: Path, tag: str) -> Path:
    """An empty folder in which checkpoint `tag` is to be written. OSError where it can't be made."""
    base.mkdir(parents=True, exist_ok=True)
    for leftover in base.glob(".*.partial"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)
    folder = partial_folder(base, tag)
    folder.mkdir()
    return folder


def publish(base: Path, tag: str, *, latest: bool) -> Path:
    """Give a finished checkpoint its name; `latest` makes it the newest. OSError where that fails."""
    folder, final, old = partial_folder(base, tag), base / tag, old_folder(base, tag)
    sync_folder(folder)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    folder.rename(final)
    sync_folder(base)
    if latest:
        pointer = base / f".{LATEST}.partial"
        write_synced(pointer, tag.encode())
        pointer.replace(base / LATEST)
        sync_folder(base)
    shutil.rmtree(old, ignore_errors=True)
    return final


def prunable(base: Path, keep: int, *, protect: str | None = None) -> list[Found]:
    """All but the newest `keep` checkpoints, oldest first, without `protect` and what `latest` names."""
    there = whole(base)
    if not there:
        return []
    kept = {protect, _latest_tag(base), *(found.tag for found in there[max(0, len(there) - keep) :])}
    return [found for found in there if found.tag not in kept]


def prune(base: Path, keep: int, *, protect: str | None = None) -> list[str]:
    """Remove the `prunable` checkpoints; returns their tags."""
    removed = prunable(base, keep, protect=protect)
    for found in removed:
        remove(found.folder)
    return [found.tag for found in removed]


def remove(folder: Path) -> None:
    """Remove a checkpoint; at a kill midway it is no checkpoint any more."""
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder)


def write_synced(file: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with file.open("wb") as stream:
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

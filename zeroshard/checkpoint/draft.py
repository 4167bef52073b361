"""A checkpoint that is being written, in a folder that gets the checkpoint's name when all of it is there.

    begin     DIR/.TAG.OWNER.partial, empty; the other ranks learn OWNER
    publish   TAG (if there is one) -> .TAG.OTHER.old; .TAG.OWNER.partial -> TAG; .latest.OWNER.partial -> latest
    close     what a failure has left is removed

Each step is one rename after an fsync of what is renamed, so a crash of the machine does no more harm than a killed
process. If two jobs save under one tag, both publish a whole checkpoint, and the later one stays.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from zeroshard.checkpoint.directory import LATEST, check_place, check_tag, is_whole, next_order
from zeroshard.checkpoint.manifest import MANIFEST, Manifest
from zeroshard.checkpoint.temporary_files import Owner, clear, delete, new_id, sync_folder, temporary_path, write_synced
from zeroshard.errors import CheckpointError

_LOGGER = logging.getLogger("zeroshard")
_ATTEMPTS = 20


def draft_folder(base: Path, tag: str, owner: str) -> Path:
    """The folder in which `owner` writes a checkpoint before it gets its name."""
    return temporary_path(base, tag, owner, "partial")


@dataclass(frozen=True)
class Draft:
    """A checkpoint that this process has begun; other processes write into the same `folder`."""

    base: Path
    tag: str
    owner: Owner

    @property
    def folder(self) -> Path:
        return self.owner.path(self.tag)

    def publish(self, *, latest: bool) -> Path:
        """Rename it to its tag, and write the tag to `latest` if wanted; returns its folder.

        Raises:
            CheckpointError: something that is no checkpoint has the name by now.
            OSError: a write or rename failed.
        """
        sync_folder(self.folder)
        pointer = self.owner.path(LATEST)
        if latest:  # before the renames, since the disk may be full
            write_synced(pointer, self.tag.encode())
        final = self.base / self.tag
        replaced = self._take_name(final)
        sync_folder(self.base)
        if latest:
            pointer.replace(self.base / LATEST)
            sync_folder(self.base)
        for old in replaced:
            delete(old)
        return final

    def _take_name(self, final: Path) -> list[Path]:
        """Rename to `final`; returns the new paths of checkpoints that had the name."""
        replaced: list[Path] = []
        for attempt in range(_ATTEMPTS):
            check_place(final)
            if os.path.lexists(final):
                old = temporary_path(self.base, self.tag, new_id(), "old")
                try:
                    final.rename(old)
                    replaced.append(old)
                except FileNotFoundError:  # another job was faster
                    continue
            try:
                self.folder.rename(final)
                break
            except OSError as error:  # another job's checkpoint is there by now
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == _ATTEMPTS - 1:
                    raise
        return replaced

    def close(self) -> None:
        """Remove what was not published, and end the owner's lock: its files count as left over from now on."""
        for path in (self.folder, self.owner.path(LATEST)):
            if os.path.lexists(path):
                delete(path)
        self.owner.close()


def begin(base: Path, tag: str, *, latest: bool = True) -> Draft:
    """Begin a checkpoint in an empty folder; `close` it in the end.

    Raises:
        CheckpointError: `tag` is no valid name, or it or `latest` would replace something that is no checkpoint.
        OSError: the folder can't be made.
    """
    check_tag(tag)
    check_place(base / tag)
    pointer = base / LATEST
    if latest and pointer.exists() and not pointer.is_file():
        raise CheckpointError(
            f"{pointer} is no file, but the newest checkpoint's tag is to be written there; move it away, or save with "
            "save_latest=False"
        )
    owner = Owner(base)
    try:
        for name in clear(base, lambda old, of: not is_whole(old) or is_whole(base / of)):
            _LOGGER.warning("another save writes %s into %s at the same time: two jobs in one directory?", name, base)
        draft = Draft(base, tag, owner)
        draft.folder.mkdir()
    except OSError:
        owner.close()
        raise
    return draft


def write_manifest(draft: Draft, manifest: Manifest) -> None:
    """Write the table of a draft whose files are all there, as the last one of its directory. Raises OSError."""
    write_synced(draft.folder / MANIFEST, replace(manifest, order=next_order(draft.base)).encode())

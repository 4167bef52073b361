"""Another key for checkpoints that are encrypted: the key of each is wrapped anew, and its files stay as they are.

    checkpoint.json   encryption.key, encryption.wrapped_key     written anew, by one rename
                      all else, and every other file             untouched

A kill leaves each checkpoint under the old key or the new one. Rejected: writing the data anew under new keys of the
checkpoints, which reads and writes all of it; whoever had the old key may have read that before.
"""

from __future__ import annotations

from pathlib import Path

from zeroshard.checkpoint.keys import KeyService
from zeroshard.checkpoint.manifest import MANIFEST, SEALED_VERSION, encode_sealed, read_content, read_manifest
from zeroshard.checkpoint.temporary_files import delete, new_id, sync_folder, temporary_path, write_synced
from zeroshard.errors import CheckpointError


def is_sealed(folder: Path) -> bool:
    """Whether a checkpoint is encrypted. Raises CheckpointError where it is none."""
    return bool(read_content(folder)["version"] == SEALED_VERSION)


def rekey(folder: Path, old: KeyService, new: KeyService) -> bool:
    """Wrap the key of an encrypted checkpoint anew. Returns whether anything had to be done.

    Raises:
        CheckpointError: it is not encrypted, not with `old`, damaged, or can't be written; it is what it was.
    """
    where = folder / MANIFEST
    content = read_content(folder)
    if content["version"] != SEALED_VERSION:
        raise CheckpointError(f"{where} is not encrypted; a key only takes the place of another")
    header = content.get("encryption")
    if isinstance(header, dict) and header.get("key") == new.id:
        read_manifest(folder, new)
        return False
    manifest = read_manifest(folder, old)
    assert manifest.seal is not None, "an encrypted table has the seal that opened it"
    staged = temporary_path(folder, MANIFEST, new_id(), "partial")
    try:
        write_synced(staged, encode_sealed(manifest.order, manifest.seal.rewrapped(new), content["sealed"]))
        staged.replace(where)
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"{where} can't be written anew: {error}") from error
    finally:
        delete(staged)
    return True

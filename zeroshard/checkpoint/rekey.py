"""Changes the key of encrypted checkpoints: the key of each checkpoint is wrapped by another key.

    checkpoint.json   encryption.key, encryption.wrapped_key     replaced, by one rename
                      all other keys, and all other files        unchanged

After a kill each checkpoint has the old key or the new one. Rejected: encrypting the data with new keys, which reads
and writes all of it, although a user who had the old key may have read it before.
"""

from __future__ import annotations

from pathlib import Path

from zeroshard.checkpoint.keys import KeyService
from zeroshard.checkpoint.manifest import ENCRYPTED_VERSION, MANIFEST, encode_encrypted, read_content, read_manifest
from zeroshard.checkpoint.temporary_files import delete, new_id, sync_folder, temporary_path, write_synced
from zeroshard.errors import CheckpointError


def is_encrypted(folder: Path) -> bool:
    """Whether a checkpoint is encrypted. Raises CheckpointError for a folder that is no checkpoint."""
    return bool(read_content(folder)["version"] == ENCRYPTED_VERSION)


def rekey(folder: Path, old: KeyService, new: KeyService) -> bool:
    """Wrap the key of an encrypted checkpoint by `new`. Returns False if it was so before.

    Raises:
        CheckpointError: it is not encrypted, not with `old`, damaged, or can't be written; it is unchanged.
    """
    where = folder / MANIFEST
    content = read_content(folder)
    if content["version"] != ENCRYPTED_VERSION:
        raise CheckpointError(f"{where} is not encrypted; a key only takes the place of another")
    header = content.get("encryption")
    if isinstance(header, dict) and header.get("key") == new.id:
        read_manifest(folder, new)
        return False
    manifest = read_manifest(folder, old)
    assert manifest.encryption is not None, "an encrypted table was opened by its encryption"
    staged = temporary_path(folder, MANIFEST, new_id(), "partial")
    try:
        write_synced(staged, encode_encrypted(manifest.order, manifest.encryption.rewrapped(new), content["sealed"]))
        staged.replace(where)
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"{where} can't be written anew: {error}") from error
    finally:
        delete(staged)
    return True

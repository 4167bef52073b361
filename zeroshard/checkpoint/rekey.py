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
from zeroshard.checkpoint.signature import Signer, is_signed, sign, signed_digests
from zeroshard.checkpoint.temporary_files import delete, new_id, sync_folder, temporary_path, write_synced
from zeroshard.errors import CheckpointError


def is_encrypted(folder: Path) -> bool:
    """Whether a checkpoint is encrypted. Raises CheckpointError for a folder that is no checkpoint."""
    return bool(read_content(folder)["version"] == ENCRYPTED_VERSION)


def rekey(folder: Path, old: KeyService, new: KeyService, signer: Signer | None = None) -> bool:
    """Wrap the key of an encrypted checkpoint by `new`. Returns False if it was so before.

    Args:
        signer: has signed the checkpoint, and signs its new table; None for one that is not signed.

    Raises:
        CheckpointError: it is not encrypted, not with `old`, signed by another, damaged, or can't be written; it is
            unchanged.
    """
    digests = _signed_files(folder, signer) if is_signed(folder) else None
    changed = _rewrap(folder, old, new)
    if digests is not None and signer is not None:
        sign(folder, signer, digests)  # also where a kill came between the table and the signature
    return changed


def _signed_files(folder: Path, signer: Signer | None) -> dict[str, str]:
    """The digests of the files that were signed, without the table's."""
    if signer is None:
        raise CheckpointError(
            f"{folder} is signed, and its table changes with the key: give the key that signs as --signing-key"
        )
    found = signed_digests(folder, (signer.public,))
    return {name: digest for name, digest in found.items() if name != MANIFEST}


def _rewrap(folder: Path, old: KeyService, new: KeyService) -> bool:
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

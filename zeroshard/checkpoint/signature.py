"""Signatures of checkpoints (Ed25519, RFC 8032): a load can demand that one of some keys has signed a checkpoint.

    DIR/TAG/signature.json   {"format", "version", "key": "ed25519:...", "files": {name: SHA-256}, "signature"}

The files are those of the table, and the table itself. So each byte that a load reads, and that there are no more and
no fewer files, is what was signed; also for encrypted checkpoints, without their key. A save writes the signature into
the draft, before the checkpoint gets its name. The ranks of a load divide the files and compare their digests before
anything is changed. An older checkpoint of the same signer that was put back is found by the audit log (`audit`).

Rejected: signing the table alone, whose CRC-32 checksums find accidents, but not who knows how to keep them; and a
signature in the table, which would have to be left out of what is signed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from zeroshard.checkpoint import jsonfile
from zeroshard.checkpoint.directory import SIGNATURE
from zeroshard.checkpoint.keys import KEY_NBYTES, new_secret_file, secret_from
from zeroshard.checkpoint.manifest import MANIFEST, OWN_FILE
from zeroshard.checkpoint.temporary_files import delete, new_id, sync_folder, temporary_path, write_synced
from zeroshard.errors import CheckpointError

SIGNERS_ENVIRONMENT = "ZEROSHARD_CHECKPOINT_SIGNED_BY"
"""The variable with public keys, separated by spaces, of which one must have signed what is loaded or verified."""
_FORMAT, _VERSION = "zeroshard signature", 1
_FIELDS = frozenset({"format", "version", "key", "files", "signature"})
_PURPOSE = b"zeroshard checkpoint signature 1\n"
_PREFIX = "ed25519:"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SIGNATURE_NBYTES = 64
_CHUNK_NBYTES = 4 << 20
_MAX_NBYTES = 64 << 20


class Signer(Protocol):
    """Signs as Ed25519 does; users implement it for a key management service that keeps its key.

    `public` is the 32 bytes of the public key. `sign` returns 64 bytes, and raises ValueError or OSError if it fails.
    """

    @property
    def public(self) -> bytes: ...

    def sign(self, message: bytes) -> bytes: ...


@dataclass(frozen=True)
class LocalSigner:
    """A Signer whose private key this process has.

    Args:
        secret: the seed of the key, 32 bytes.
    """

    secret: bytes = field(repr=False)

    @property
    def public(self) -> bytes:
        """See Signer."""
        found: bytes = self._key().public_key().public_bytes_raw()
        return found

    def sign(self, message: bytes) -> bytes:
        """See Signer."""
        found: bytes = self._key().sign(message)
        return found

    def _key(self) -> Any:
        return _ed25519().Ed25519PrivateKey.from_private_bytes(self.secret)


def signer_of(key: str | Signer | None) -> Signer | None:
    """A signer as it is, or the one whose private key a reference names. Raises CheckpointError as `secret_from`."""
    return LocalSigner(secret_from(key, "signing key")) if isinstance(key, str) else key


@dataclass(frozen=True)
class Signing:
    """How a save is signed: rank 0 has the `signer`, other ranks give the digests of what they have written."""

    signer: Signer | None


def signing_on(rank: int, key: str | Signer) -> Signing:
    """How a rank takes part in signing; rank 0 alone reads the key. Raises CheckpointError as `secret_from`."""
    return Signing(signer_of(key) if rank == 0 else None)


def public_text(public: bytes) -> str:
    """A public key as text, ed25519:BASE64."""
    return _PREFIX + base64.b64encode(public).decode()


def public_keys(texts: str | Sequence[str]) -> tuple[bytes, ...]:
    """Public keys from their texts: ed25519:BASE64, or file:PATH of a file with one in each line.

    Raises:
        CheckpointError: one is no public key, or its file can't be read.
    """
    found: list[bytes] = []
    for text in (texts,) if isinstance(texts, str) else texts:
        lines = _lines(text.removeprefix("file:")) if text.startswith("file:") else [text]
        found += [_public(line, text) for line in lines]
    if not found:
        raise CheckpointError("no public key was given, of which one must have signed a checkpoint")
    return tuple(found)


def trusted_keys(texts: str | Sequence[str] | None) -> tuple[bytes, ...]:
    """The public keys that were given, else those of the environment; empty where no signature is demanded."""
    if texts is not None:
        return public_keys(texts)
    named = os.environ.get(SIGNERS_ENVIRONMENT, "").split()
    return public_keys(named) if named else ()


def new_signing_key_file(file: Path) -> LocalSigner:
    """Write a random private key to a new file that only its owner can read. Raises CheckpointError if it exists."""
    _ed25519()
    return LocalSigner(new_secret_file(file))


def digest_of_file(file: Path) -> str:
    """The SHA-256 of a file. Raises CheckpointError if it can't be read."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_NBYTES))
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from error
    return digest.hexdigest()


def is_signed(folder: Path) -> bool:
    """Whether a checkpoint has a signature, valid or not."""
    return os.path.lexists(folder / SIGNATURE)


def sign(folder: Path, signer: Signer, digests: Mapping[str, str] | None = None) -> None:
    """Sign a checkpoint, in place of a signature that it has.

    Args:
        digests: the SHA-256 of each file but the table; None computes them.

    Raises:
        CheckpointError: it can't be read, the signature can't be made or written, or it is not that of the public key.
    """
    names = _names(folder)
    known = {} if digests is None else dict(digests)
    files = {name: known[name] if name in known else digest_of_file(folder / name) for name in names}
    message = _message(files)
    try:
        public, signature = signer.public, signer.sign(message)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder} can't be signed: {error}") from error
    if not _fits(public, KEY_NBYTES) or not _fits(signature, _SIGNATURE_NBYTES):
        raise CheckpointError(
            f"{folder} can't be signed: the signer gives something else than {KEY_NBYTES} bytes of a public key and "
            f"{_SIGNATURE_NBYTES} bytes of a signature"
        )
    if not _is_valid(public, signature, message):
        raise CheckpointError(
            f"{folder} can't be signed: what the signer gives is no Ed25519 signature of the message that it got by "
            f"{public_text(public)}, so no load would accept it"
        )
    text = {"format": _FORMAT, "version": _VERSION, "key": public_text(public), "files": files}
    staged = temporary_path(folder, SIGNATURE, new_id(), "partial")
    try:
        write_synced(staged, jsonfile.encode({**text, "signature": base64.b64encode(signature).decode()}))
        staged.replace(folder / SIGNATURE)
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"{folder / SIGNATURE} can't be written: {error.strerror}") from error
    finally:
        delete(staged)


def signed_digests(folder: Path, trusted: Sequence[bytes]) -> dict[str, str]:
    """The SHA-256 of each file as one of the keys has signed it; the files are not read.

    Raises:
        CheckpointError: it is not signed, by none of these keys, or the signature was changed.
    """
    where = folder / SIGNATURE
    if not is_signed(folder):
        raise CheckpointError(f"{folder} is not signed (there is no {where}), and a signature is demanded")
    data = jsonfile.read_bytes(where, _MAX_NBYTES)
    content = jsonfile.decode(data, where)
    files = content.get("files")
    if (
        content.keys() != _FIELDS
        or jsonfile.encode(content) != data
        or (content["format"], content["version"]) != (_FORMAT, _VERSION)
        or not isinstance(files, dict)
        or not all(_is_listed(name, digest) for name, digest in files.items())
    ):
        raise CheckpointError(f"{where} is no signature of a checkpoint, or of a newer zeroshard")
    public = _public(content["key"], str(where))
    if public not in trusted:
        raise CheckpointError(
            f"{folder} was signed by {public_text(public)}, which is none of the keys that are trusted"
        )
    try:
        signature = base64.b64decode(content["signature"], validate=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where} was changed: its signature is no base64") from error
    if len(signature) != _SIGNATURE_NBYTES or not _is_valid(public, signature, _message(files)):
        raise CheckpointError(f"{where} was changed: its signature is not that of its files by {public_text(public)}")
    return files


def check_signature(folder: Path, trusted: Sequence[bytes], *, share: int = 0, shares: int = 1) -> None:
    """Check that one of the keys has signed a checkpoint as it is.

    Args:
        share, shares: compare every `shares`-th file from this one on, where ranks divide them. All compare the table.

    Raises:
        CheckpointError: it is not signed, by none of these keys, or a file was changed, added or removed; it is named.
    """
    signed = signed_digests(folder, trusted)
    names = _names(folder)
    for name in sorted(set(names) ^ signed.keys()):
        what = "is not in the signature" if name in names else "was signed and is not there"
        raise CheckpointError(f"{folder / name} {what}: the checkpoint was changed after it was signed")
    for number, name in enumerate(names):
        if (name == MANIFEST or number % shares == share) and digest_of_file(folder / name) != signed[name]:
            raise CheckpointError(f"{folder / name} is not what was signed: it was changed or replaced")


def _names(folder: Path) -> list[str]:
    """The table and the files with tensors of a folder. Raises CheckpointError if it can't be read."""
    try:
        return sorted(name for name in os.listdir(folder) if name == MANIFEST or OWN_FILE.fullmatch(name))
    except OSError as error:
        raise CheckpointError(f"{folder} can't be read: {error.strerror}") from error


def _is_listed(name: object, digest: object) -> bool:
    named = isinstance(name, str) and (name == MANIFEST or OWN_FILE.fullmatch(name) is not None)
    return named and isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None


def _fits(value: object, nbytes: int) -> bool:
    return isinstance(value, bytes) and len(value) == nbytes


def _message(files: Mapping[str, str]) -> bytes:
    return _PURPOSE + jsonfile.canonical(dict(sorted(files.items()))).encode()


def _is_valid(public: bytes, signature: bytes, message: bytes) -> bool:
    invalid: type[Exception] = import_module("cryptography.exceptions").InvalidSignature
    try:
        _ed25519().Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except invalid:
        return False
    return True


def _public(text: object, where: str) -> bytes:
    raw = text.strip().removeprefix(_PREFIX) if isinstance(text, str) and text.strip().startswith(_PREFIX) else ""
    try:
        key = base64.b64decode(raw, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_NBYTES:
        raise CheckpointError(
            f"{where[:80]} is no public key: {_PREFIX} and 32 bytes in base64 are wanted, as `zeroshard checkpoint "
            "new-signing-key` prints them, or file:PATH of a file that has such lines"
        )
    return key


def _lines(path: str) -> list[str]:
    try:
        text = jsonfile.read_bytes(Path(path), _CHUNK_NBYTES).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"file:{path} has no public keys, but bytes that are no text") from error
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _ed25519() -> Any:
    try:
        return import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError as error:
        raise CheckpointError(
            "signed checkpoints need the package cryptography; pip install 'zeroshard[encrypt]'"
        ) from error

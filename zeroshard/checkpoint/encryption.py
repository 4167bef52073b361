"""Encrypts a checkpoint: it has a random key of its own, from which a key is derived for each file and table.

    key service --wraps--> key of the checkpoint --HKDF(name)--> a key for each file, and for each table

    checkpoint.json   {format, version 2, order, encryption {id, key, wrapped_key}, sealed: encrypted table}
    a file            1 MiB and a tag | 1 MiB and a tag | ... | the rest and a tag        (see encrypted_file)

A key encrypts one file only, so the numbers of chunks serve as nonces, and a file, chunk or table from another place or
another checkpoint can't be decrypted. Not encrypted are the order among the directory's checkpoints, a random id, the
id of the wrapping key, and the sizes of files. Changing the key of a key service changes `key` and `wrapped_key` only.
Method: envelope encryption; AES-256-GCM (NIST SP 800-38D), HKDF-SHA256 (RFC 5869).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.keys import ENVIRONMENT, KEY_NBYTES, KeyService, gcm
from zeroshard.errors import CheckpointError

_ID_NBYTES = 16
_NONCE_NBYTES = 12
_FIELDS = ("id", "key", "wrapped_key")


@dataclass(frozen=True)
class Encryption:
    """The key of one checkpoint, and what is written of it.

    Attributes:
        id: a random id of the checkpoint.
        service: id of the key that wraps the checkpoint's key.
        wrapped: the wrapped key of the checkpoint.
    """

    id: str
    service: str
    wrapped: bytes
    _key: bytes = field(repr=False)

    def file_key(self, name: str) -> Any:
        """AES-GCM with the key of one file; see `keys.gcm`."""
        return gcm(_derived(self._key, self.id, f"file {name}"))

    def encrypt_table(self, name: str, content: Mapping[str, Any]) -> str:
        """A table, encrypted, as text."""
        data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        return _text(nonce + self._table_key(name).encrypt(nonce, data, name.encode()))

    def decrypt_table(self, name: str, text: object, where: Path) -> dict[str, Any]:
        """The table from such text. Raises CheckpointError if it was changed."""
        try:
            data = _bytes(text)
            nonce, encrypted = data[:_NONCE_NBYTES], data[_NONCE_NBYTES:]
            content = json.loads(self._table_key(name).decrypt(nonce, encrypted, name.encode()))
        except ValueError as error:
            raise CheckpointError(f"{where} is damaged or was changed: its encrypted table does not open") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{where} is damaged: its encrypted table is no table")
        return content

    def header(self) -> dict[str, str]:
        """The unencrypted header, from which `open_encryption` gets the key with the key service."""
        return {"id": self.id, "key": self.service, "wrapped_key": _text(self.wrapped)}

    def rewrapped(self, service: KeyService) -> Encryption:
        """The same encryption with its key wrapped by another key."""
        return Encryption(self.id, service.id, _wrapped(service, self._key), self._key)

    def _table_key(self, name: str) -> Any:
        return gcm(_derived(self._key, self.id, f"table {name}"))


def new_encryption(service: KeyService) -> Encryption:
    """Encryption for a new checkpoint. Raises CheckpointError if the service can't wrap its key."""
    key = secrets.token_bytes(KEY_NBYTES)
    return Encryption(secrets.token_hex(_ID_NBYTES), service.id, _wrapped(service, key), key)


def open_encryption(header: object, service: KeyService | None, where: Path) -> Encryption:
    """The encryption of an existing checkpoint, from its header.

    Raises:
        CheckpointError: no key is given, or another one, or the header was changed.
    """
    if not isinstance(header, dict) or not all(isinstance(header.get(name), str) for name in _FIELDS):
        raise CheckpointError(f"{where} is damaged: it does not say how it was encrypted")
    wrapping = str(header["key"])[:80]
    if service is None:
        raise CheckpointError(
            f"{where} is encrypted, with key {wrapping}: name that key in the config's checkpoint.encryption_key, in "
            f"load(encryption_key=...), or for commands in {ENVIRONMENT} (file:PATH, env:NAME or command:PROGRAM)"
        )
    if service.id != wrapping:
        raise CheckpointError(f"{where} was encrypted with key {wrapping}, and the key that was given is {service.id}")
    try:
        wrapped = _bytes(header["wrapped_key"])
        key = service.unwrap(wrapped)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{where}: key {service.id} does not open it: {error}") from error
    if len(key) != KEY_NBYTES:
        raise CheckpointError(f"{where}: key {service.id} has opened {len(key)} bytes in place of {KEY_NBYTES}")
    return Encryption(str(header["id"]), service.id, wrapped, key)


def _wrapped(service: KeyService, key: bytes) -> bytes:
    try:
        return service.wrap(key)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"checkpoint key {service.id} can't wrap the key of a checkpoint: {error}") from error


def _derived(key: bytes, salt: str, purpose: str) -> bytes:
    """HKDF-SHA256 of 32 bytes, one block of its output."""
    extracted = hmac.digest(salt.encode(), key, hashlib.sha256)
    return hmac.digest(extracted, f"zeroshard {purpose}".encode() + b"\x01", hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError("text is wanted")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"it is no base64 ({error})") from error

"""Keys that encrypt checkpoints, and where they come from.

    file:/run/secrets/checkpoint.key     32 bytes, or as 64 hexadecimal digits or base64; only for its owner (chmod 600)
    env:CHECKPOINT_KEY                   the same as text
    command:kms-decrypt --name training  what the program prints; no shell reads the line

Each checkpoint is encrypted with a random key of its own (see `encryption`). A key from here wraps (encrypts) that key,
so it can be replaced (`zeroshard checkpoint rekey`) without writing tensors again. For a key management service that
does not give its keys away, users implement `KeyService`. Rejected: pass phrases, which need a slow derivation and tend
to be short.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import secrets
import shlex
import stat
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from zeroshard.errors import CheckpointError

KEY_NBYTES = 32
ENVIRONMENT = "ZEROSHARD_CHECKPOINT_KEY"
"""The variable with a key's reference (such as `file:...`) for commands and exports that read encrypted checkpoints."""
_NONCE_NBYTES = 12
_COMMAND_S = 60.0
_LONGEST = 4096
_PURPOSE = b"zeroshard checkpoint key 1"
_HEX = re.compile(r"[0-9a-fA-F]{64}")


class KeyService(Protocol):
    """Wraps the keys of checkpoints, as a key management service does.

    `id` tells keys apart in messages, and is written with a wrapped key; it must reveal nothing of the key. Both
    methods raise ValueError or OSError if they fail, `unwrap` also for what another key wrapped.
    """

    @property
    def id(self) -> str: ...

    def wrap(self, key: bytes) -> bytes: ...

    def unwrap(self, wrapped: bytes) -> bytes: ...


@dataclass(frozen=True)
class LocalKey:
    """A KeyService whose key this process has: AES-256 in Galois/Counter mode.

    Args:
        secret: 32 bytes.
    """

    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """The first 16 digits of a digest of the key."""
        return hashlib.sha256(_PURPOSE + self.secret).hexdigest()[:16]

    def wrap(self, key: bytes) -> bytes:
        """See KeyService."""
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        encrypted: bytes = gcm(self.secret).encrypt(nonce, key, _PURPOSE)
        return nonce + encrypted

    def unwrap(self, wrapped: bytes) -> bytes:
        """See KeyService."""
        key: bytes = gcm(self.secret).decrypt(wrapped[:_NONCE_NBYTES], wrapped[_NONCE_NBYTES:], _PURPOSE)
        return key


def gcm(key: bytes) -> Any:
    """AES-GCM of the package `cryptography`. Raises CheckpointError without that package.

    Its `decrypt` and `decrypt_into` raise ValueError (in place of InvalidTag) for data that was changed, or encrypted
    with another key.
    """
    try:
        aead: Any = import_module("cryptography.hazmat.primitives.ciphers.aead")
    except ImportError as error:
        raise CheckpointError(
            "encrypted checkpoints need the package cryptography; pip install 'zeroshard[encrypt]'"
        ) from error
    return _Gcm(aead.AESGCM(key))


class _Gcm:
    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._invalid: type[Exception] = import_module("cryptography.exceptions").InvalidTag

    def encrypt(self, nonce: bytes, data: bytes, beside: bytes) -> bytes:
        found: bytes = self._inner.encrypt(nonce, data, beside)
        return found

    def encrypt_into(self, nonce: bytes, data: memoryview, out: memoryview) -> None:
        self._inner.encrypt_into(nonce, data, None, out)

    def decrypt(self, nonce: bytes, data: bytes, beside: bytes) -> bytes:
        found: bytes = self._checked(lambda: self._inner.decrypt(nonce, data, beside))
        return found

    def decrypt_into(self, nonce: bytes, data: memoryview, out: memoryview) -> None:
        self._checked(lambda: self._inner.decrypt_into(nonce, data, None, out))

    def _checked(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except self._invalid as error:
            raise ValueError("it was changed, or encrypted with another key") from error


def key_from(reference: str, environment: Mapping[str, str] = os.environ) -> LocalKey:
    """The key that a reference names; see the docstring of this module. Raises CheckpointError as `secret_from`."""
    return LocalKey(secret_from(reference, "checkpoint key", environment))


def secret_from(reference: str, what: str, environment: Mapping[str, str] = os.environ) -> bytes:
    """The 32 bytes that a reference names.

    Args:
        what: "checkpoint key" or another name of it, for messages.

    Raises:
        CheckpointError: it can't be read, or is no key. No message shows any of it.
    """
    kind, _, rest = reference.partition(":")
    readers: Mapping[str, Callable[[str, str], bytes]] = {
        "file": _from_file,
        "env": lambda name, where: _from_environment(name, where, environment),
        "command": _from_command,
    }
    if kind not in readers or not rest:
        raise CheckpointError(f"{what} {_shown(reference)}: give file:PATH, env:NAME or command:PROGRAM ARGUMENTS")
    maker = "new-signing-key" if what == "signing key" else "new-key"
    data = readers[kind](rest, f"{what} {kind}:{rest}")
    key = _decoded(data)
    if key is None:
        raise CheckpointError(
            f"{what} {kind}:{rest}: {KEY_NBYTES} bytes are wanted, as they are, as 64 hexadecimal digits or as "
            f"base64; there are {len(data)} bytes of something else. `zeroshard checkpoint {maker} FILE` makes one"
        )
    return key


def service_of(key: str | KeyService | None) -> KeyService | None:
    """A key service as it is, or the key that a reference names. Raises CheckpointError as `key_from`."""
    return key_from(key) if isinstance(key, str) else key


def key_in_environment() -> LocalKey | None:
    """The key that the environment names; None if it names none. Raises CheckpointError as `key_from`."""
    reference = os.environ.get(ENVIRONMENT)
    return None if not reference else key_from(reference)


def new_key_file(file: Path) -> LocalKey:
    """Write a random key to a new file that only its owner can read. Raises CheckpointError if the file exists."""
    return LocalKey(new_secret_file(file))


def new_secret_file(file: Path) -> bytes:
    """As `new_key_file`; returns the 32 bytes."""
    secret = secrets.token_bytes(KEY_NBYTES)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as stream:
            stream.write(secret.hex().encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise CheckpointError(f"{file} can't be written as a new key: {error.strerror}") from error
    return secret


def _shown(reference: str) -> str:
    """A wrong reference in words; it is not shown, since it may be a key by mistake."""
    return "is empty" if not reference else f"of {len(reference)} characters names no place"


def _from_file(name: str, where: str) -> bytes:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{where} is no plain file")
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise CheckpointError(
                    f"{where} can be read or changed by other users "
                    f"(mode {stat.S_IMODE(status.st_mode):o}); chmod 600 {name}"
                )
            return os.read(descriptor, _LONGEST)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{where} can't be read: {error.strerror}") from error


def _from_environment(name: str, where: str, environment: Mapping[str, str]) -> bytes:
    if name not in environment:
        raise CheckpointError(f"{where}: there is no such variable in this rank's environment")
    return environment[name].encode()


def _from_command(line: str, where: str) -> bytes:
    try:
        words = shlex.split(line)
        done = subprocess.run(words, capture_output=True, timeout=_COMMAND_S, check=False, stdin=subprocess.DEVNULL)
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{where} can't be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{where} did not end in {_COMMAND_S:.0f} seconds") from error
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip()[-500:]
        raise CheckpointError(f"{where} ended with status {done.returncode}: {told or 'it printed no error'}")
    return done.stdout[:_LONGEST]


def _decoded(data: bytes) -> bytes | None:
    if len(data) == KEY_NBYTES:
        return data
    text = data.decode("ascii", errors="replace").strip()
    if _HEX.fullmatch(text):
        return bytes.fromhex(text)
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if len(key) == KEY_NBYTES else None

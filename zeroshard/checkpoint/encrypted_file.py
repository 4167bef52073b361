"""Files of a checkpoint, encrypted or not, behind the same interfaces for writes (`Sink`) and reads (`Readable`).

    plain bytes    |--- 1 MiB ---|--- 1 MiB ---|- rest -|
    encrypted      |--- 1 MiB ---|tag|--- 1 MiB ---|tag|- rest -|tag|       chunk k has the nonce k, a tag 16 bytes

Positions and sizes in a checkpoint's table are those of plain bytes; this module maps them to the file. A chunk is
decrypted as a whole, and the last one is kept for the next read. Rejected: encrypting each tensor's part separately, so
that readers would have to know where parts begin.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from zeroshard.checkpoint.encryption import Encryption
from zeroshard.checkpoint.sink import Sink, open_sink

CHUNK = 1 << 20
TAG = 16


class Readable(Protocol):
    """A file that is open for reading."""

    def read_into(self, view: memoryview, at: int) -> int:
        """Fill a view with the bytes from `at` on; returns their number, 0 at the end.

        Raises OSError, or ValueError if the file was changed.
        """
        ...

    def close(self) -> None: ...


class PlainFile:
    """A file that is not encrypted."""

    def __init__(self, file: Path) -> None:
        self._descriptor = _opened(file)

    def read_into(self, view: memoryview, at: int) -> int:
        """See Readable."""
        return os.preadv(self._descriptor, [view], at)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class EncryptedFile:
    """An encrypted file.

    Args:
        nbytes: number of its plain bytes.
    """

    def __init__(self, file: Path, nbytes: int, encryption: Encryption) -> None:
        self._descriptor, self._nbytes = _opened(file), nbytes
        self._key = encryption.file_key(file.name)
        self._encrypted, self._plain = memoryview(bytearray(CHUNK + TAG)), memoryview(bytearray(CHUNK))
        self._held = -1

    def read_into(self, view: memoryview, at: int) -> int:
        """See Readable."""
        done, wanted = 0, min(len(view), max(0, self._nbytes - at))
        while done < wanted:
            number, begin = divmod(at + done, CHUNK)
            length = min(CHUNK, self._nbytes - number * CHUNK)
            count = min(length - begin, wanted - done)
            if count == length and number != self._held:
                self._open_chunk(number, length, view[done : done + count])
            else:
                self._hold(number, length)
                view[done : done + count] = self._plain[begin : begin + count]
            done += count
        return done

    def _hold(self, number: int, length: int) -> None:
        if self._held != number:
            self._held = -1
            self._open_chunk(number, length, self._plain[:length])
            self._held = number

    def _open_chunk(self, number: int, length: int, out: memoryview) -> None:
        encrypted, place, done = self._encrypted[: length + TAG], number * (CHUNK + TAG), 0
        while done < len(encrypted):
            count = os.preadv(self._descriptor, [encrypted[done:]], place + done)
            if count == 0:
                raise ValueError(f"it ends inside of its chunk {number}: it was cut off")
            done += count
        try:
            self._key.decrypt_into(_nonce(number), encrypted, out)
        except ValueError as error:
            raise ValueError(f"its chunk {number} was changed or is of another place") from error

    def close(self) -> None:
        """Close the file, and overwrite the decrypted chunk."""
        os.close(self._descriptor)
        self._plain[:], self._held = bytes(CHUNK), -1


class EncryptedSink(Sink):
    """Encrypts what is written, chunk by chunk, and writes it to another sink."""

    def __init__(self, inner: Sink, key: Any) -> None:
        self._inner, self._key = inner, key
        self._plain, self._encrypted = memoryview(bytearray(CHUNK)), memoryview(bytearray(CHUNK + TAG))
        self._filled = self._number = 0

    def write(self, data: memoryview) -> None:
        """See Sink."""
        data = data.cast("B") if data.nbytes else data
        done = 0
        while done < data.nbytes:
            if not self._filled and data.nbytes - done >= CHUNK:
                self._send(data[done : done + CHUNK])
                done += CHUNK
                continue
            count = min(data.nbytes - done, CHUNK - self._filled)
            self._plain[self._filled : self._filled + count] = data[done : done + count]
            self._filled += count
            done += count
            if self._filled == CHUNK:
                self._filled = 0
                self._send(self._plain)

    def finish(self) -> None:
        """See Sink."""
        if self._filled:
            rest, self._filled = self._plain[: self._filled], 0
            self._send(rest)
        self._inner.finish()

    def close(self) -> None:
        """See Sink."""
        self._inner.close()

    def _send(self, chunk: memoryview) -> None:
        encrypted = self._encrypted[: len(chunk) + TAG]
        self._key.encrypt_into(_nonce(self._number), chunk, encrypted)
        self._number += 1
        self._inner.write(encrypted)


def new_file(file: Path, nbytes: int, encryption: Encryption | None) -> Sink:
    """A new file for `nbytes` plain bytes. Raises OSError."""
    if encryption is None:
        return open_sink(file, nbytes)
    return EncryptedSink(open_sink(file, nbytes_on_disk(nbytes, encryption)), encryption.file_key(file.name))


def open_file(file: Path, nbytes: int, encryption: Encryption | None) -> Readable:
    """An existing file of `nbytes` plain bytes. Raises OSError."""
    return PlainFile(file) if encryption is None else EncryptedFile(file, nbytes, encryption)


def nbytes_on_disk(nbytes: int, encryption: Encryption | None) -> int:
    """Size of a file with `nbytes` plain bytes."""
    return nbytes if encryption is None else nbytes + -(-nbytes // CHUNK) * TAG


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _opened(file: Path) -> int:
    return os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

"""Reads a whole file that a user names, which may be a device without an end or a pipe into which nobody writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

MOST = 16 << 20
"""Bytes: thousands of times as many as a config, a hostfile or a file of variables has."""


def read_bounded(path: Path, most: int = MOST) -> bytes:
    """All bytes of a file or of a pipe that is being written.

    Raises:
        OSError: it can't be read, or has more than `most` bytes.
    """
    # For a pipe this does not wait for a writer: where there is none it is empty.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        os.set_blocking(descriptor, True)
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB")
    return content

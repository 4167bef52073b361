"""Checkpoints of tests go to memory where there is a tmpfs: each save waits several times for the disk otherwise."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """An empty directory, in memory if possible."""
    shared = "/dev/shm"
    with tempfile.TemporaryDirectory(
        prefix="checkpoints-", dir=shared if os.access(shared, os.W_OK) else None
    ) as directory:
        yield Path(directory)

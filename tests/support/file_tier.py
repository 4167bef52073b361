"""A tier of files in a folder: state that can only be read and written, as far from memory as it goes.

Nothing of the engine knows it. It is slow, and what a user would want of files (room that is reserved, nothing left
behind) it has not.
"""

from __future__ import annotations

from pathlib import Path

import torch

from zeroshard.plan.plan import Plan
from zeroshard.tiers import Completion


class FileRow:
    """A Row whose elements are the content of a file."""

    values = None

    def __init__(self, path: Path, numel: int, dtype: torch.dtype) -> None:
        self.path, self.numel, self.dtype = path, numel, dtype
        path.write_bytes(bytes(numel * dtype.itemsize))

    def read(self, start: int, into: torch.Tensor) -> Completion:
        assert into.dtype == self.dtype

        def finish() -> None:
            with self.path.open("rb") as file:
                file.seek(start * self.dtype.itemsize)
                content = bytearray(file.read(into.nbytes))
            assert len(content) == into.nbytes
            if content:
                into.copy_(torch.frombuffer(content, dtype=self.dtype))

        return finish

    def write(self, start: int, source: torch.Tensor) -> None:
        assert source.dtype == self.dtype
        assert start + source.numel() <= self.numel
        with self.path.open("r+b") as file:
            file.seek(start * self.dtype.itemsize)
            file.write(source.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


class FileMemory:
    """A TierMemory that makes a file for each row."""

    pinned = 0

    def __init__(self, folder: Path) -> None:
        self.folder, self.used, self._rows = folder, 0, 0
        folder.mkdir(parents=True)

    def allocate(self, numel: int, dtype: torch.dtype) -> FileRow:
        self.used += numel * dtype.itemsize
        self._rows += 1
        return FileRow(self.folder / f"{self._rows}.bin", numel, dtype)

    def reserve(self, nbytes: int) -> None:
        """Files grow."""

    def close(self) -> None:
        """The folder is the test's."""


class FileTier:
    """Makes the memory of one rank, and remembers it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.memory: FileMemory | None = None

    def __call__(self, plan: Plan, device: torch.device) -> FileMemory:
        self.memory = FileMemory(self._folder)
        return self.memory

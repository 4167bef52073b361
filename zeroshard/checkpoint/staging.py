"""Copies this rank's state for an asynchronous save, so that training goes on while it is written.

One host buffer, pinned on a machine with a GPU, has all pieces. It is allocated by the first such save and kept for the
next. Training waits for the copies only. Rejected: memory from torch's pinned allocator, which rounds a large buffer up
to a power of two.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from zeroshard.checkpoint.writer import Piece
from zeroshard.errors import ZeroShardWarning

_ALIGNMENT = 64


def place_pieces(pieces: Sequence[Piece]) -> list[int]:
    """The first byte of each piece in one buffer for all pieces, and last the size of that buffer."""
    places = [0]
    for piece in pieces:
        places.append(-(-(places[-1] + piece.nbytes) // _ALIGNMENT) * _ALIGNMENT)
    return places


class Staging:
    """Host memory for a copy of pieces of a state that lives on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self._buffer.numel()

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Pieces with the current values, in the buffer. They are valid until the next `copy` or `close`."""
        places = place_pieces(pieces)
        self._reserve(places[-1])
        staged: list[Piece] = []
        for piece, at in zip(pieces, places, strict=False):
            size = piece.nbytes
            held = self._buffer[at : at + size].view(piece.info.dtype) if size else None
            if held is not None:
                piece.copy_into(held)
            staged.append(replace(piece, source=held))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return staged

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self.nbytes:
            return
        self.close()
        self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        if self._device.type == "cuda":
            runtime = torch.cuda.cudart()
            assert runtime is not None
            status = int(runtime.cudaHostRegister(self._buffer.data_ptr(), nbytes, 0))
            self._locked = status == 0
            if not self._locked:
                warnings.warn(
                    f"the copy for asynchronous saves ({nbytes} bytes) can't be page-locked (CUDA error {status}), so "
                    "copying into it is slower",
                    ZeroShardWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        """Free the buffer."""
        if self._locked:
            runtime = torch.cuda.cudart()
            assert runtime is not None
            runtime.cudaHostUnregister(self._buffer.data_ptr())
            self._locked = False
        self._buffer = torch.empty(0, dtype=torch.uint8)

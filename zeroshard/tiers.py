"""What a tier of memory is to the engine: it gives rows of elements a place, and moves parts of them in and out.

    device    rows in place, from torch's allocator                         kernels compute on them where they are
    host      rows in place, from one mapping, locked for copies            the processor does, or parts pass the device
    others    rows that are only read and written (files, say)              parts pass through memory

A row that lies in place (`values`) is used there; nothing is copied for it. All others are brought to memory, changed
and put back, by whoever updates them. A tier is an object that the engine is given, so another one is another file.
Rejected: a tensor for every row (files would be mapped into memory), whose pages the system brings in and throws out
when it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Completion = Callable[[], object]
"""Returns when the elements have arrived; called before they are used, on any thread."""


_CLEARED_AT_ONCE = 1 << 22


class Row(Protocol):
    """Elements at rest in a tier; `numel` and `dtype` are those of the whole row."""

    numel: int
    dtype: torch.dtype

    @property
    def values(self) -> torch.Tensor | None:
        """The elements where they lie, 1-D, where code can compute on them; None where they must be moved first."""
        ...

    def read(self, start: int, into: torch.Tensor) -> Completion | None:
        """Copy elements from `start` on into `into`. None: it is done in the order of the current stream."""
        ...

    def write(self, start: int, source: torch.Tensor) -> Completion | None:
        """Copy `source` over the elements from `start` on; `source` may change after the completion only."""
        ...


class TierMemory(Protocol):
    """The memory of a tier on one rank.

    Attributes:
        used: bytes of the rows given so far.
        pinned: bytes of host memory that are locked for it.
    """

    used: int
    pinned: int

    def allocate(self, numel: int, dtype: torch.dtype) -> Row:
        """A row of zeros; it lives as long as this memory."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Rows of so many bytes will be asked for, beyond those that were expected when this was made."""
        ...

    def close(self) -> None:
        """The model is closed: give back what nobody can reach without a row that has to be moved first."""
        ...


class RowInPlace:
    """A row whose elements are a tensor.

    Args:
        values: 1-D.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.numel, self.dtype = values.numel(), values.dtype

    @property
    def values(self) -> torch.Tensor:
        """See Row."""
        return self._values

    def read(self, start: int, into: torch.Tensor) -> None:
        """See Row."""
        into.copy_(self._values[start : start + into.numel()], non_blocking=True)

    def write(self, start: int, source: torch.Tensor) -> None:
        """See Row."""
        self._values[start : start + source.numel()].copy_(source, non_blocking=True)


def values_of(row: Row) -> torch.Tensor:
    """The elements of a row that lies in place."""
    assert row.values is not None, "a row that has to be moved first"
    return row.values


def loaded(row: Row, cut: slice) -> torch.Tensor:
    """Elements of a row to look at: where they lie, or in host memory, read now."""
    if row.values is not None:
        return row.values[cut]
    start, stop, _ = cut.indices(row.numel)
    found = torch.empty(stop - start, dtype=row.dtype)
    finish(row.read(start, found))
    return found


def store(row: Row, cut: slice, values: torch.Tensor) -> None:
    """Give elements of a row new values, converted to its dtype; done when this returns, or in stream order."""
    if row.values is not None:
        row.values[cut].copy_(values)
        return
    start, stop, _ = cut.indices(row.numel)
    finish(row.write(start, values.detach().to("cpu", row.dtype).expand(stop - start).contiguous()))


def clear(row: Row) -> None:
    """Set all elements of a row to 0, some of them at a time."""
    if row.values is not None:
        row.values.zero_()
        return
    zeros = torch.zeros(min(row.numel, _CLEARED_AT_ONCE), dtype=row.dtype)
    for start in range(0, row.numel, _CLEARED_AT_ONCE):
        finish(row.write(start, zeros[: row.numel - start]))


def finish(completion: Completion | None) -> None:
    """Wait for a read or write, where it is not in stream order."""
    if completion is not None:
        completion()


@dataclass(frozen=True)
class RowPart:
    """Elements [low, high) of a row."""

    row: Row
    low: int
    high: int

    @staticmethod
    def of(values: torch.Tensor) -> RowPart:
        """The whole of a flat tensor."""
        return RowPart(RowInPlace(values), 0, values.numel())

    @property
    def dtype(self) -> torch.dtype:
        return self.row.dtype

    def values(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the part, as `loaded`."""
        return loaded(self.row, slice(self.low + start, self.high if stop is None else self.low + stop))

    def store(self, values: torch.Tensor, start: int = 0) -> None:
        """Give the elements from `start` on new values, as `store`."""
        store(self.row, slice(self.low + start, self.low + start + values.numel()), values)

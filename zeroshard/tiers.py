"""Interfaces of a tier of memory: it allocates rows of elements, and reads and writes parts of them.

    device    rows in place, from torch's allocator                   kernels compute on them
    host      rows in place, from one mapping, pinned for copies      the processor computes, or the device, in pieces
    others    rows that are only read and written, such as files      updates read parts into memory and write them back

A row in place (`values`) is used without a copy. Code that updates other rows reads parts of them into memory, changes
these and writes them back. The engine is given an object per tier, so another tier is another file. Rejected: a tensor
for every row, so that files would be mapped into memory, and the system would choose when to read and write pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Completion = Callable[[], object]
"""Waits until the elements have arrived; called before they are used, on any thread."""


_CLEARED_AT_ONCE = 1 << 22


class Row(Protocol):
    """Elements that rest in a tier, 1-D."""

    numel: int
    dtype: torch.dtype

    @property
    def values(self) -> torch.Tensor | None:
        """The elements, 1-D, if code can compute on them in place; None if they have to be read first."""
        ...

    def read(self, start: int, into: torch.Tensor) -> Completion | None:
        """Copy elements from `start` on into `into`, 1-D, of the row's dtype.

        Returns a completion; None if the copy is in the order of the current stream.
        """
        ...

    def write(self, start: int, source: torch.Tensor) -> Completion | None:
        """Copy `source`, 1-D, of the row's dtype, to the elements from `start` on.

        Returns as `read`. `source` may be changed only after the completion, which keeps it alive.
        """
        ...


class TierMemory(Protocol):
    """The memory of a tier on one rank.

    Attributes:
        used: bytes of all rows.
        pinned: bytes of host memory that it pins.
    """

    used: int
    pinned: int

    def allocate(self, numel: int, dtype: torch.dtype) -> Row:
        """A new row of zeros, which lives as long as this memory."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Prepare for rows of `nbytes` more bytes than were expected when this was made."""
        ...

    def close(self) -> None:
        """The model was closed: free what is reachable only through rows that are not in place."""
        ...


class RowInPlace:
    """A row in place.

    Args:
        values: its elements, 1-D.
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
    """The elements of a row that is in place."""
    assert row.values is not None, "the row is not in place"
    return row.values


def loaded(row: Row, cut: slice) -> torch.Tensor:
    """Elements of a row for reading: in place, or else read now into host memory."""
    if row.values is not None:
        return row.values[cut]
    start, stop, _ = cut.indices(row.numel)
    found = torch.empty(stop - start, dtype=row.dtype)
    finish(row.read(start, found))
    return found


def store(row: Row, cut: slice, values: torch.Tensor) -> None:
    """Set elements of a row to `values`, converted to its dtype; done when this returns, or in stream order."""
    if row.values is not None:
        row.values[cut].copy_(values)
        return
    start, stop, _ = cut.indices(row.numel)
    finish(row.write(start, values.detach().to("cpu", row.dtype).expand(stop - start).contiguous()))


def clear(row: Row) -> None:
    """Set all elements of a row to 0, in pieces."""
    if row.values is not None:
        row.values.zero_()
        return
    zeros = torch.zeros(min(row.numel, _CLEARED_AT_ONCE), dtype=row.dtype)
    for start in range(0, row.numel, _CLEARED_AT_ONCE):
        finish(row.write(start, zeros[: row.numel - start]))


def finish(completion: Completion | None) -> None:
    """Wait for a read or write, if it is not in stream order."""
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
        """All elements of a flat tensor, as a row in place."""
        return RowPart(RowInPlace(values), 0, values.numel())

    @property
    def dtype(self) -> torch.dtype:
        return self.row.dtype

    def values(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the part, as `loaded`."""
        return loaded(self.row, slice(self.low + start, self.high if stop is None else self.low + stop))

    def store(self, values: torch.Tensor, start: int = 0) -> None:
        """Set the elements from `start` on to `values`, as `store`."""
        store(self.row, slice(self.low + start, self.low + start + values.numel()), values)

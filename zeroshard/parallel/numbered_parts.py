"""The parts that a loader of divided sequences gives, as a dataset and a batch sampler that others can build on.

accelerate's `skip_first_batches`, with which Trainer goes on amid an epoch, makes a new DataLoader of the dataset, the
batch sampler and the settings of the one that it gets. Of these here it makes one that gives the same parts, from some
number on. Rejected: leaving those of the loader below, whose batches would then come uncut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler


class NumberedParts(Dataset[Any]):
    """The parts of a loader by number. They come in order, so the one that was drawn last is there."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._source: Iterator[Any] = iter(())
        self._part: Any = None

    def begin(self) -> None:
        """Start at the first one."""
        self._source = iter(self.loader)

    def draw(self) -> bool:
        """Go to the next one; False where there is none."""
        self._part = next(self._source, None)
        return self._part is not None

    def __getitem__(self, number: int) -> Any:
        return self._part

    def __len__(self) -> int:
        return len(self.loader)  # pyright: ignore[reportArgumentType]  (a loader without a length has none)


class Numbers(Sampler[list[int]]):
    """The numbers of the parts, one to a batch; each part is drawn with its number."""

    def __init__(self, parts: NumberedParts) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[list[int]]:
        self._parts.begin()
        number = 0
        while self._parts.draw():
            yield [number]
            number += 1

    def __len__(self) -> int:
        return len(self._parts)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass, for the loader below."""
        setter = getattr(self._parts.loader, "set_epoch", None)
        if callable(setter):
            setter(epoch)


def first_of(batch: list[Any]) -> Any:
    """A batch of one part is that part."""
    return batch[0]

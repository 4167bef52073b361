"""A loader without end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {})


class RepeatingLoader:
    """Begins its loader again whenever that is exhausted, so that `next` never ends.

    Args:
        loader: anything that can be iterated over several times.

    Raises:
        StopIteration: the loader is empty.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._running = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._running)
        except StopIteration:
            self._running = iter(self.loader)
            return next(self._running)

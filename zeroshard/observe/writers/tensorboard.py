"""`tensorboard`: scalars in the event files that TensorBoard shows; torch writes them in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zeroshard.observe.monitor import Written
from zeroshard.observe.writers.optional import optional_package

_FLUSH_SECONDS = 10
PACKAGE = ("torch.utils.tensorboard", "tensorboard", "tensorboard.enabled")


class TensorBoard:
    """Writes events to a folder."""

    def __init__(self, folder: Path) -> None:
        self._writer = optional_package(*PACKAGE).SummaryWriter(str(folder), flush_secs=_FLUSH_SECONDS)

    def write(self, events: Sequence[Written]) -> None:
        """Add a point for each event."""
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()

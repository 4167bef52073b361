"""`csv_monitor`: one file per name of an event, with a line per value.

    OUTPUT_PATH/JOB_NAME/Train_Samples_train_loss.csv      step,train_loss / 8,2.25 / ...

A run that goes on adds to the files. Each write is flushed, so a run that is killed loses no line.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from zeroshard.errors import ConfigError
from zeroshard.observe.monitor import Written


class CsvFiles:
    """Writes events under a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"csv_monitor.output_path: {folder} can't be made: {error.strerror}") from error

    def write(self, events: Sequence[Written]) -> None:
        """Add a line for each event."""
        for name, value, samples in events:
            csv.writer(self._file(name)).writerow([samples, value])
        for file in self._files.values():
            file.flush()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            file = self._files[name] = path.open("a", newline="", encoding="utf-8")
            if file.tell() == 0:
                csv.writer(file).writerow(["step", name.rpartition("/")[2]])
        return self._files[name]

    def close(self) -> None:
        """Close the files."""
        with ExitStack() as files:  # all of them, though one fails
            for file in self._files.values():
                files.callback(file.close)
        self._files.clear()

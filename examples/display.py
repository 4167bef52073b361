"""What rank 0 shows and writes while it trains: a progress bar, the memory table, metrics.jsonl.

On a terminal the bar moves in place; into a file or with NO_COLOR set it is a plain line now and then, so that a log
stays readable. The other ranks hold the same object with `quiet=True`, so the training loop has no `if rank == 0`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from smooth import Smooth

LINE_EVERY = 50


class Display:
    """A context manager around the training loop.

    Args:
        metrics: file of JSON lines; lines after step `start` are dropped (a resumed run writes them again).
        total: steps of the whole run.
        last: the step at which this launch stops; the bar runs to there.
        start: steps that are done.
        quiet: show and write nothing.
    """

    def __init__(self, metrics: Path, total: int, start: int, last: int, quiet: bool):
        self._quiet = quiet
        self._total = total
        self._smooth = Smooth()
        self._held_out: float | None = None
        self._console = Console(quiet=quiet, width=None if Console().is_terminal else 120)
        self._live = self._console.is_terminal and not os.environ.get("NO_COLOR") and not quiet
        self._progress = Progress(
            BarColumn(bar_width=12 if self._console.width < 100 else 24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._progress.add_task("training", total=last, completed=start, numbers="")
        self._file = None if quiet else _reopen(metrics, start)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()

    def memory(self, table: Table) -> None:
        """Shows the table of state bytes per rank."""
        self._console.print(table)

    def step(self, step: int, loss: float, tokens: int, seconds: float, rate: float) -> None:
        """One optimizer step is over.

        Args:
            loss: mean over the ranks, in nats a token.
            tokens: of all ranks, in this step.
            seconds: that it took.
            rate: learning rate of the next step.
        """
        self._write(step=step, loss=loss, tokens_per_second=tokens / seconds, seconds=seconds, lr=rate)
        self._smooth.add(loss)
        held_out = "" if self._held_out is None else f" held out {self._held_out:.2f}"
        numbers = (
            f"loss {self._smooth.value:5.3f}{held_out} {tokens / seconds:5,.0f} tokens/s {seconds * 1000:4.0f} ms/step"
        )
        if self._live:
            self._progress.update(self._task, completed=step, numbers=numbers)
        elif step % LINE_EVERY == 0 or step == 1 or step == self._total:
            self._console.print(f"step {step}/{self._total}  {numbers}", highlight=False)

    def held_out(self, step: int, loss: float) -> None:
        """The held-out loss at `step`."""
        self._held_out = loss
        self._write(step=step, held_out=loss)

    def _write(self, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()


def _reopen(path: Path, start: int) -> Any:
    """The metrics file at its end, without what a run that was cut off wrote after step `start`."""
    kept = []
    if start > 0 and path.exists():
        kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= start]
    file = path.open("w")
    file.writelines(line + "\n" for line in kept)
    return file

"""`zeroshard top`: the ranks of this node in the terminal, from the files that `metrics` leaves."""

from __future__ import annotations

import time
from pathlib import Path

from rich.table import Table

from zeroshard.observe.metrics.files import RankSamples, read_all

GIB = 2**30
_COLUMNS = ("run", "rank", "step", "skipped", "loss", "norm", "samples/s", "tokens/s", "memory", "last step")


def table_of(folder: Path, now: float | None = None) -> Table:
    """One row per rank of this node."""
    now = time.time() if now is None else now
    table = Table(*_COLUMNS, title=f"zeroshard on this node ({folder})")
    for said in sorted(read_all(folder), key=lambda said: (said.run, said.rank)):
        table.add_row(*_row(said, now))
    return table


def _row(said: RankSamples, now: float) -> list[str]:
    plain = {s.name: s.value for s in said.samples if isinstance(s.value, float) and not s.labels}
    memory = {
        s.labels["kind"]: s.value
        for s in said.samples
        if s.name == "zeroshard_memory_bytes" and isinstance(s.value, float)
    }

    def shown(name: str, form: str) -> str:
        return format(plain[name], form) if name in plain else "-"

    held = memory.get("allocated", memory.get("process"))
    ended = plain.get("zeroshard_last_step_timestamp_seconds")
    return [
        said.run,
        str(said.rank),
        shown("zeroshard_steps_total", ".0f"),
        shown("zeroshard_skipped_steps_total", ".0f"),
        shown("zeroshard_loss", ".4g"),
        shown("zeroshard_gradient_norm", ".4g"),
        shown("zeroshard_samples_per_second", ".4g"),
        shown("zeroshard_tokens_per_second", ".4g"),
        "-" if held is None else f"{held / GIB:.2f} GiB",
        "-" if ended is None else f"{max(now - ended, 0):.0f} s ago",
    ]

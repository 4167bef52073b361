"""What comes out of rows that were measured one after the other: tables, files, and where the figures come from.

A benchmark says what stands in a row (`cells`); this file makes a table on the terminal of it and one for
benchmarks/README.md, and writes that beside the JSON of everything. Rejected: columns as objects, for three tables.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.ranks import ROOT


@dataclass
class Outcome:
    """One row: what was asked for, and what came out of it (None where nothing did, for the reason in `error`)."""

    request: str
    row: dict[str, Any] | None = None
    error: str | None = None
    seconds: float = 0.0
    log: str = field(default="", repr=False)


def add_limits(parser: argparse.ArgumentParser, name: str, *, budget: float, timeout: float, least: float) -> None:
    """The options of every benchmark that measures rows: how long they may take, and where `name`.json and .md go."""
    parser.add_argument("--budget", type=float, default=budget, help="seconds for all rows")
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds for one row")
    parser.add_argument("--least", type=float, default=least, help="seconds that must be left to begin a row")
    parser.add_argument("--output", type=Path, help=f"folder for {name}.json and {name}.md")
    parser.add_argument("--commit", help="what to write as the commit where there is no repository")


def add_ratios(outcomes: Sequence[Outcome], setting: Sequence[str]) -> None:
    """Give every row its ratio to the mean floor of the same setting, which is not a graph; None where there is none.

    Args:
        setting: what two rows must share for their ratio to mean something.
    """

    def shared(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in setting)

    rows = [outcome.row for outcome in outcomes if outcome.row is not None]
    floors: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["engine"] == "floor" and not row.get("graph"):
            floors.setdefault(shared(row), []).append(row["step_s"])
    for row in rows:
        found = floors.get(shared(row))
        row["ratio"] = None if found is None else round(row["step_s"] / statistics.mean(found), 3)


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def unmeasured(outcome: Outcome, columns: Sequence[str]) -> list[str]:
    """The row of what gave no figures: what was asked for, and why there is nothing."""
    engine, *options = outcome.request.split()
    return [engine, " ".join(options), outcome.error or "no result", *[""] * (len(columns) - 3)]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines; two columns of text, then numbers."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * 2 + " ---: |" * (len(columns) - 2)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def console_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The same for the terminal, where the second column gives way."""
    made = Table(title=title)
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index < 2 else "right", no_wrap=index != 1)
    for row in rows:
        made.add_row(*row)
    return made


def provenance(args: argparse.Namespace, outcomes: Sequence[Outcome], name: str) -> dict[str, Any]:
    """Commit, torch, card, date and command: without them a figure can't be checked."""
    row = next((outcome.row for outcome in outcomes if outcome.row is not None), {})
    return {
        "commit": args.commit or _commit(),
        "torch": row.get("torch", ""),
        "card": row.get("card", ""),
        "world": args.nproc,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
    }


def save(folder: Path | None, name: str, origin: Mapping[str, Any], outcomes: Sequence[Outcome], text: str) -> int:
    """Write `name`.json and the `text` of `name`.md where a folder is given; the exit status of the benchmark."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {"request": o.request, "seconds": o.seconds, "error": o.error, "result": o.row, "log": o.log}
            for o in outcomes
        ]
        (folder / f"{name}.json").write_text(json.dumps({**origin, "rows": rows}, indent=1) + "\n")
        (folder / f"{name}.md").write_text(text)
    return 0 if any(outcome.row is not None for outcome in outcomes) else 1


def _commit() -> str:
    """The commit that is checked out, with a mark if files differ from it; 'unknown' outside of a repository."""
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        changes = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    if commit.returncode != 0:
        return "unknown"
    return commit.stdout.strip() + (" with changes" if changes.stdout.strip() else "")

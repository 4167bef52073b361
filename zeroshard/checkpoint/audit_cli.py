"""`zeroshard audit`: shows the log of a directory of checkpoints, and checks that it was not changed.

The exit status is 0 if all is as it was written, 1 if a log or checkpoint was changed, 2 for a wrong call.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zeroshard.checkpoint import directory
from zeroshard.checkpoint.audit import LOG, check_load, read_log
from zeroshard.errors import CheckpointError

app = typer.Typer(
    name="audit",
    help="Read the log of what was done with the checkpoints of a directory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_Path = Annotated[Path, typer.Argument(help="A directory of checkpoints.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_SHOWN = 12


@app.command(name="ls")
def list_(path: _Path, as_json: _Json = False) -> None:
    """List the actions, oldest first."""
    found = read_log(path)
    if as_json:
        _print_json({"acts": [asdict(entry) for entry in found.entries], "problem": found.problem})
    else:
        table = Table("n", "time", "who", "act", "tag", "hash", title=Text(str(path / LOG)))
        for entry in found.entries:
            table.add_row(str(entry.n), entry.time, Text(entry.who), entry.act, Text(entry.tag), entry.hash[:_SHOWN])
        Console().print(table)
    _end([] if found.problem is None else [found.problem], quiet=as_json)


@app.command()
def verify(
    path: _Path,
    head: Annotated[
        str | None,
        typer.Option(help="Hash of a line, kept elsewhere, that must be in the log.", show_default=False),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Check every line, and that each checkpoint is the one that was saved last under its tag."""
    found = read_log(path)
    problems = [] if found.problem is None else [found.problem]
    if head is not None and not any(head and entry.hash.startswith(head) for entry in found.entries):
        problems.append(f"{path / LOG} has no line with hash {head[:64]}: it was begun anew, or cut off before that")
    if not problems:
        problems = [text for one in directory.whole(path) if (text := _problem(path, one.folder)) is not None]
    last = found.entries[-1].hash if found.entries else None
    if as_json:
        _print_json({"lines": len(found.entries), "head": last, "whole": not problems, "problems": problems})
    elif not problems:
        print(f"{path / LOG} is as it was written: {len(found.entries)} lines; the last has hash {last}")
    _end(problems, quiet=as_json)


def _problem(base: Path, folder: Path) -> str | None:
    try:
        check_load(base, folder)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _end(problems: list[str], *, quiet: bool) -> None:
    for problem in () if quiet else problems:
        Console().print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))

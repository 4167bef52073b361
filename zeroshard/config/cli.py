"""`zeroshard config`: what a config means, before a job is started with it.

`explain` prints the given and derived settings with value, origin and what is done with each, and on request those at
their defaults; `check` only says whether the config can be obeyed. Both leave with status 1 and all problems when it
can't. `migrate` and `schema` are in `cli_migrate`. Mounted by the launcher as `config`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zeroshard.config.batch import NAMES
from zeroshard.config.cli_migrate import migrate_command, schema_command
from zeroshard.config.document import read_document
from zeroshard.config.entries import gather_entries
from zeroshard.config.keys import ANY_NAME, Status, key_table
from zeroshard.config.problems import Problems
from zeroshard.config.resolve import DEFAULT, Resolution, Setting, resolve
from zeroshard.errors import ConfigError

app = typer.Typer(
    help="Read a DeepSpeed config as zeroshard reads it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_WIDE = 1000
"""Columns where the output is not a terminal: lines are as long as they need to be."""

_COLUMN = 32
"""Characters that value and origin take in a line for a pipe; a longer one shifts its own line."""

_HEADINGS = ("key", "value", "origin", "status")

_BESIDE_KEY = 60
"""Columns that value, origin and status need at least beside a key, which is not broken; they wrap."""

File = Annotated[Path, typer.Argument(help="The JSON config.", show_default=False)]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--world-size", "-n", min=1, help="Data-parallel ranks [WORLD_SIZE, what the three batch sizes say, or 1]."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Defaults = Annotated[bool, typer.Option("--defaults", "-d", help="Also show the settings at their defaults.")]
AllKeys = Annotated[bool, typer.Option("--all", "-a", help="Show every known key, given or not.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help='A value for an "auto" or absent key.')
]


@app.command()
def explain(
    file: File,
    world_size: WorldSize = None,
    set_: Overrides = None,
    defaults: Defaults = False,
    all_: AllKeys = False,
    json_: AsJson = False,
) -> None:
    """Print what a config gives and what follows from it: values, their origins, and what zeroshard does with them."""
    resolution = _resolve_or_exit(file, world_size, set_, json_)
    if all_:
        resolution = with_all_keys(resolution)
    if json_:
        typer.echo(json.dumps(as_json(resolution), indent=2))
        return
    title = Text(f"{file.name}, world size {resolution.config.world_size}{_assumed(world_size)}", style="bold")
    notes = [Text(f"warning: {message}", style="yellow") for message in resolution.warnings]
    shown = [setting for setting in resolution.settings if defaults or all_ or setting.origin != DEFAULT]
    hidden = len(resolution.settings) - len(shown)
    if hidden:
        notes.append(Text(f"{hidden} settings are at their defaults; --defaults shows them", style="dim"))
    _print_all(title, _rows(shown), notes)


@app.command()
def check(file: File, world_size: WorldSize = None, set_: Overrides = None, json_: AsJson = False) -> None:
    """Say whether a config can be obeyed; status 1 and every problem if not."""
    resolution = _resolve_or_exit(file, world_size, set_, json_)
    if json_:
        typer.echo(json.dumps({"problems": [], "warnings": list(resolution.warnings)}, indent=2))
        return
    for message in resolution.warnings:
        _console(sys.stderr).print(Text(f"warning: {message}", style="yellow"))
    batch, ranks = resolution.config.batch, resolution.config.world_size
    product = f"{batch.micro} x {batch.accumulation} accumulation x {ranks} rank{'s' if ranks > 1 else ''}"
    typer.echo(
        f"{file.name} is valid: ZeRO stage {resolution.config.zero.stage}, {resolution.config.precision.compute}, "
        f"batch {batch.train} = {product}{_assumed(world_size)}"
    )


app.command("migrate")(migrate_command)
app.command("schema")(schema_command)


def with_all_keys(resolution: Resolution) -> Resolution:
    """With a line for every known key; those that nobody gave are at their defaults."""
    shown = {setting.path for setting in resolution.settings}
    rest = [
        Setting(key.path, key.default, DEFAULT, key.status, key.note)
        for key in key_table().keys.values()
        if key.path not in shown and not key.path.endswith(f"params.{ANY_NAME}")
    ]
    return replace(resolution, settings=tuple(sorted((*resolution.settings, *rest), key=lambda one: one.path)))


def as_json(resolution: Resolution) -> dict[str, Any]:
    """The table as plain JSON values."""
    settings = [
        {"key": s.path, "value": s.value, "origin": s.origin, "status": s.status.value, "note": s.note}
        for s in resolution.settings
    ]
    return {
        "world_size": resolution.config.world_size,
        "problems": [],
        "warnings": list(resolution.warnings),
        "settings": settings,
    }


def _told(given: int | None) -> int | None:
    """The number of ranks that an option or the environment says."""
    from_environment = os.environ.get("WORLD_SIZE", "")
    said = int(from_environment) if from_environment.isdecimal() else 0
    return given or said or None


def _assumed(given: int | None) -> str:
    return " (assumed; give --world-size)" if _told(given) is None else ""


def _fitting(file: Path, overrides: dict[str, Any]) -> int:
    """The number of ranks at which the three batch sizes agree, where the config gives all of them; else 1."""
    problems = Problems()
    entries = gather_entries(read_document(file, problems), overrides, key_table(), problems)
    values = [entries[name].value for name in NAMES if name in entries]
    if len(values) < len(NAMES) or not all(type(value) is int and value > 0 for value in values):
        return 1
    train, micro, accumulation = values
    ranks, rest = divmod(train, micro * accumulation)
    return ranks if rest == 0 and ranks > 0 else 1


def _overrides(assignments: list[str] | None) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for assignment in assignments or ():
        path, equals, value = assignment.partition("=")
        if not equals or not path:
            raise typer.BadParameter(
                f"{assignment!r} is not PATH=VALUE, such as train_batch_size=32", param_hint="--set"
            )
        try:
            overrides[path] = json.loads(value)
        except ValueError:
            overrides[path] = value
    return overrides


def _resolve_or_exit(file: Path, world_size: int | None, assignments: list[str] | None, as_json_: bool) -> Resolution:
    overrides = _overrides(assignments)
    try:
        return resolve(file, world_size=_told(world_size) or _fitting(file, overrides), overrides=overrides)
    except ConfigError as error:
        if as_json_:
            typer.echo(json.dumps({"problems": list(error.problems), "warnings": []}, indent=2))
        else:
            console = _console(sys.stderr)
            console.print(Text(f"{file.name} can't be obeyed:", style="bold red"))
            for problem in error.problems:
                console.print(Text(f"  - {problem}"), soft_wrap=True)
            if _told(world_size) is None and any(problem.startswith(NAMES) for problem in error.problems):
                console.print(Text("The number of ranks was assumed; --world-size N says it."), soft_wrap=True)
        raise typer.Exit(1) from error


def _console(stream: Any) -> Console:
    """Colours and the terminal's width on a terminal; plain long lines elsewhere. rich itself honours NO_COLOR."""
    return Console(file=stream, width=None if stream.isatty() else _WIDE, highlight=False)


def _print_all(title: Text, rows: list[_Row], notes: list[Text]) -> None:
    """Print to stdout: a table that fits the terminal, or a plain line for each setting where there is none."""
    console = _console(sys.stdout)
    if not console.is_terminal:
        typer.echo("\n".join((title.plain, *_lines(rows), *(note.plain for note in notes))))
        return
    fits = console.width >= max((len(row.key) for row in rows), default=0) + _BESIDE_KEY
    for part in (title, *([_table(rows)] if fits else _blocks(rows)), *notes):
        console.print(part)


def _lines(rows: list[_Row]) -> list[str]:
    """Columns for a pipe or a file: a long value shifts what follows in its own line and in no other."""
    table = [_HEADINGS, *((row.key, row.value, row.origin, row.status) for row in rows)]
    keys, *others = zip(*table, strict=True)
    widths = [max(map(len, keys)), *(max(len(cell) for cell in column if len(cell) <= _COLUMN) for column in others)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table]


class _Row(NamedTuple):
    key: str
    value: str
    origin: str
    status: str
    style: str


def _rows(settings: Sequence[Setting]) -> list[_Row]:
    return [
        _Row(
            setting.path,
            json.dumps(setting.value),
            setting.origin,
            _status_in_words(setting),
            "dim" if setting.origin.startswith(DEFAULT) else "",
        )
        for setting in settings
    ]


def _table(rows: list[_Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(_HEADINGS[0], no_wrap=True)
    for heading in _HEADINGS[1:]:
        table.add_column(heading, overflow="fold")
    for *cells, style in rows:
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _blocks(rows: list[_Row]) -> list[Text | Padding]:
    """For a terminal that is too narrow for the table: each key with its value, the rest in words below it."""
    blocks: list[Text | Padding] = []
    for key, value, origin, status, style in rows:
        words = status if status == origin else f"{origin}; {status}"
        blocks.append(Text(f"{key} = {value}", style=style, overflow="fold"))
        blocks.append(Padding(Text(words, style="dim"), (0, 0, 0, 4)))
    return blocks


def _status_in_words(setting: Setting) -> str:
    if setting.status is Status.OBEYED:
        return "default" if setting.origin == DEFAULT else "obeyed"
    if setting.status is Status.DEPRECATED:
        return f"deprecated; write {setting.note}"
    if setting.status is Status.ACCEPTED:
        return f"no effect here: {setting.note}"
    feature = setting.note.partition("; ")[0]
    later = "not built yet" if setting.status is Status.INERT_ONLY else "will not be built"
    return f"switched off; {feature}: {later}"

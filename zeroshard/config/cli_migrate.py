"""`zeroshard config migrate` and `zeroshard config schema`."""

from __future__ import annotations

import difflib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from zeroshard.config.document import file_text
from zeroshard.config.migrate import Migration, migrate
from zeroshard.config.schema import json_schema
from zeroshard.errors import ConfigError

File = Annotated[Path, typer.Argument(help="The JSON config.", show_default=False)]
Write = Annotated[bool, typer.Option("--write", help="Change the file; without it the change is only shown.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def migrate_command(file: File, write: Write = False, json_: AsJson = False) -> None:
    """Rewrite deprecated keys; comments, order and layout stay. Shows the change as a diff."""
    try:
        text = file_text(file)
        migration = migrate(text, file.name)
    except ConfigError as error:
        if json_:
            typer.echo(json.dumps({"problems": list(error.problems), "changes": []}, indent=2))
        else:
            typer.echo("\n".join(f"{file.name} can't be migrated: {problem}" for problem in error.problems), err=True)
        raise typer.Exit(1) from error
    if write and migration.changes:
        _replace(file, migration.text)
    if json_:
        changes = [{"line": change.line, "old": change.old, "new": change.new} for change in migration.changes]
        print(json.dumps({"problems": [], "changes": changes, "written": write and bool(changes)}, indent=2))
        return
    _show(file, text, migration, write)


def schema_command() -> None:
    """Print a JSON Schema of the config, for editors."""
    print(json.dumps(json_schema(), indent=2))


def _show(file: Path, text: str, migration: Migration, write: bool) -> None:
    if not migration.changes:
        print(f"{file.name} has no deprecated keys")
        return
    before, after = text.splitlines(keepends=True), migration.text.splitlines(keepends=True)
    for line in difflib.unified_diff(before, after, f"{file.name} (as it is)", f"{file.name} (migrated)"):
        print(line.rstrip("\r\n"))
    count = len(migration.changes)
    done = "rewritten" if write else "to be rewritten; --write does it"
    print(f"{count} key{'s' if count > 1 else ''} {done}", file=sys.stderr)


def _replace(file: Path, text: str) -> None:
    """The new text in place of the old one, whole or not at all, with the file's mode."""
    target = file.resolve()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(text.encode("utf-8"))
        os.chmod(name, target.stat().st_mode & 0o777)
        os.replace(name, target)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise

"""`zeroshard checkpoint`: lists, verifies, prunes, holds and encrypts checkpoints anew, and converts them.

Each command prints a table or, with --json, one JSON document on standard output and nothing else. The exit status is 0
for success, 1 for damage that was found, 2 for a wrong call.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from zeroshard.checkpoint import directory, foreign_commands
from zeroshard.checkpoint.audit import Act, record
from zeroshard.checkpoint.dtypes import name_of
from zeroshard.checkpoint.hold import place_hold, release_hold
from zeroshard.checkpoint.keys import key_from, key_in_environment, new_key_file
from zeroshard.checkpoint.manifest import MANIFEST, TensorKind
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.rekey import is_encrypted, rekey
from zeroshard.checkpoint.signature import (
    check_signature,
    is_signed,
    new_signing_key_file,
    public_text,
    sign,
    signer_of,
    trusted_keys,
)
from zeroshard.errors import CheckpointError

app = typer.Typer(
    name="checkpoint",
    help="List, verify and prune checkpoints; export them, and import those of other systems.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
foreign_commands.register(app)
_LOOKED_INTO = 1000  # folders within a folder that holds no checkpoint
_NAMED = 5
_Path = Annotated[Path, typer.Argument(help="A directory of checkpoints, or one checkpoint.", show_default=False)]
_SignedBy = Annotated[
    list[str] | None,
    typer.Option(help="A public key that must have signed it, ed25519:... or file:PATH; may be given several times."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command(name="ls")
def list_(
    path: _Path,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors of the newest one.")] = False,
    as_json: _Json = False,
) -> None:
    """List the checkpoints of a directory, or the tensors of one checkpoint."""
    if tensors or (path / MANIFEST).is_file():
        _list_tensors(_folder(path), as_json)
        return
    rows = [_summary(found) for found in _checkpoints_in(path)]
    newest = directory.newest(path)
    if newest.problem is not None:
        print(f"warning: {newest.problem}; a load takes {newest.tag}", file=sys.stderr)
    if as_json:
        _print_json(rows)
        return
    table = Table("tag", "step", "ranks", "tensors", "size", "state", title=Text(str(path)))
    for row in rows:
        state = row["problem"] or ("latest" if row["tag"] == newest.tag else "held" if row["held"] else "")
        numbers = (_shown(row["step"]), _shown(row["ranks"]), _shown(row["tensors"]), _size(row["bytes"]))
        table.add_row(row["tag"], *numbers, Text(state))
    Console().print(table)


@app.command()
def verify(path: _Path, signed_by: _SignedBy = None, as_json: _Json = False) -> None:
    """Read every byte of a checkpoint (the newest of a directory) against its checksum, and check its signature."""
    folder, trusted = _folder(path), trusted_keys(signed_by)
    problems: list[str] = []
    nbytes = 0
    try:
        if trusted:
            check_signature(folder, trusted)
        with CheckpointReader(folder) as reader:
            nbytes = reader.manifest.nbytes
            problems = _verify(reader, quiet=as_json)
    except CheckpointError as error:
        problems = [str(error)]
    if as_json:
        found = {"checkpoint": str(folder), "bytes": nbytes, "whole": not problems}
        _print_json({**found, "signed": is_signed(folder), "signature checked": bool(trusted), "problems": problems})
    else:
        console = Console()
        for problem in problems:
            console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
        if not problems:
            unchecked = "; its signature was not checked (--signed-by KEY)" if is_signed(folder) else ""
            signed = ", and it is signed as demanded" if trusted else unchecked
            whole = f"{folder} is whole: {_size(nbytes)} match their checksums{signed}"
            console.print(whole, markup=False, highlight=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


@app.command()
def prune(
    path: _Path,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest to keep.", show_default=False)],
    as_json: _Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Remove all but the newest checkpoints of a directory. The one that `latest` names is kept."""
    _checkpoints_in(path)
    tags = directory.prunable(path, keep)
    for number, found in enumerate(tags):
        if not dry_run:
            directory.remove(found)
            record(path, Act.DELETE, found.tag, "")
        if not as_json:
            print(f"{'would remove' if dry_run else 'removed'} {found.tag} ({number + 1} of {len(tags)})")
    if as_json:
        _print_json({"removed": [] if dry_run else [found.tag for found in tags], "found": [f.tag for f in tags]})
    elif not tags:
        print("nothing to remove")


@app.command(name="new-key")
def new_key(
    file: Annotated[Path, typer.Argument(help="A new file.", show_default=False)],
    as_json: _Json = False,
) -> None:
    """Make a random key for encrypted checkpoints, in a file that only its owner can read."""
    key = new_key_file(file)
    if as_json:
        _print_json({"file": str(file), "key": key.id})
    else:
        print(f"key {key.id} is in {file}; without it, checkpoints that it encrypts can't be read")


@app.command(name="rekey")
def rekey_(
    path: _Path,
    new: Annotated[str, typer.Option("--new-key", help="file:PATH, env:NAME or command:PROGRAM.", show_default=False)],
    old: Annotated[
        str | None,
        typer.Option("--key", help="The current key. [default: the one of the environment]", show_default=False),
    ] = None,
    signing_key: Annotated[
        str | None, typer.Option("--signing-key", help="The key that has signed them.", show_default=False)
    ] = None,
    as_json: _Json = False,
) -> None:
    """Change the key of encrypted checkpoints, of all in a directory or of one. Tensors are not written again."""
    signer = signer_of(signing_key)
    before, after = key_in_environment() if old is None else key_from(old), key_from(new)
    if before is None:
        raise CheckpointError("rekey: give the key that the checkpoints have now, as --key file:PATH")
    folders = [path] if (path / MANIFEST).is_file() else [found.folder for found in _checkpoints_in(path)]
    done: list[str] = []
    plain = [folder for folder in folders if not is_encrypted(folder)]
    for number, folder in enumerate(one for one in folders if one not in plain):
        changed = rekey(folder, before, after, signer)
        if changed:
            record(folder.resolve().parent, Act.REKEY, folder.name)
        done.append(folder.name)
        if not as_json:
            state = f"has key {after.id}" if changed else f"had key {after.id} before"
            print(f"{folder.name} {state} ({number + 1} of {len(folders) - len(plain)})")
    if as_json:
        _print_json({"key": after.id, "rekeyed": done, "in the clear": [folder.name for folder in plain]})
    elif plain:
        print(f"not encrypted, left as they are: {', '.join(folder.name for folder in plain)}")


@app.command(name="new-signing-key")
def new_signing_key(
    file: Annotated[Path, typer.Argument(help="A new file.", show_default=False)],
    as_json: _Json = False,
) -> None:
    """Make a random key that signs checkpoints, in a file that only its owner can read; prints its public key."""
    public = public_text(new_signing_key_file(file).public)
    if as_json:
        _print_json({"file": str(file), "public": public})
    else:
        print(f"the private key is in {file}; loads demand the public one:\n{public}")


@app.command(name="sign")
def sign_(
    path: _Path,
    key: Annotated[str, typer.Option("--key", help="file:PATH, env:NAME or command:PROGRAM.", show_default=False)],
) -> None:
    """Sign a checkpoint (the newest of a directory) as it is now, in place of a signature that it has."""
    folder, signer = _folder(path), signer_of(key)
    assert signer is not None
    sign(folder, signer)
    record(folder.resolve().parent, Act.SIGN, folder.name)
    print(f"{folder} is signed by {public_text(signer.public)}")


@app.command()
def hold(
    path: Annotated[Path, typer.Argument(help="One checkpoint, DIRECTORY/TAG.", show_default=False)],
    why: Annotated[str, typer.Option(help="The reason, which others can read.", show_default=False)],
) -> None:
    """Protect a checkpoint from being pruned, or replaced by a save."""
    place_hold(_one(path), why)
    print(f"{path} is held")


@app.command()
def release(
    path: Annotated[Path, typer.Argument(help="One checkpoint, DIRECTORY/TAG.", show_default=False)],
) -> None:
    """End the protection of a checkpoint that was held."""
    release_hold(_one(path))
    print(f"{path} is no longer held")


def _one(path: Path) -> Path:
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is no checkpoint; give DIRECTORY/TAG")
    return path.resolve()


def _verify(reader: CheckpointReader, *, quiet: bool) -> list[str]:
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task("verifying", total=reader.manifest.nbytes)
        return reader.verify(lambda nbytes: bar.advance(task, nbytes))


def _folder(path: Path) -> Path:
    """The folder of a checkpoint: the path itself, or the newest checkpoint in it."""
    if (path / MANIFEST).is_file():
        return path
    try:
        return directory.find(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_below(path)}") from error


def _checkpoints_in(path: Path) -> list[directory.Found]:
    """The checkpoints of a directory, oldest first. Raises CheckpointError if there are none."""
    found = directory.whole(path)
    if not found:
        raise CheckpointError(f"{path} holds no finished checkpoint{_below(path)}")
    return found


def _below(path: Path) -> str:
    """What an error adds if a path is no folder, is a checkpoint itself, or has directories of checkpoints in it."""
    if (path / MANIFEST).is_file():
        return f": it is one checkpoint itself; give the directory that it is in, {path.resolve().parent}"
    if not path.is_dir():
        return f": {path} is {'a file' if path.exists() else 'not there'}"
    try:
        folders = [folder for folder in sorted(path.iterdir())[:_LOOKED_INTO] if folder.is_dir()]
        names = [str(folder) for folder in folders if directory.whole(folder)]
    except OSError as error:
        return f": {error.strerror}"
    if not names:
        return ""
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return f"; there are some one level deeper: give one of {shown}"


def _summary(found: directory.Found) -> dict[str, Any]:
    row: dict[str, Any] = {
        "tag": found.tag,
        "step": None,
        "ranks": None,
        "tensors": None,
        "bytes": None,
        "held": directory.is_held(found.folder),
        "problem": None,
    }
    try:
        with CheckpointReader(found.folder) as reader:
            manifest, step = reader.manifest, _step(reader)
    except CheckpointError as error:
        return {**row, "problem": str(error)}
    return {
        **row,
        "step": step,
        "ranks": manifest.world_size,
        "tensors": len(manifest.tensors),
        "bytes": manifest.nbytes,
    }


def _step(reader: CheckpointReader) -> int | None:
    """The engine's count of steps or, after `zeroshard.save`, the optimizer's; None if neither was saved."""
    counters = reader.state.get("counters")
    if isinstance(counters, dict) and "global_steps" in counters:
        return counters["global_steps"]
    kinds = (TensorKind.OPTIMIZER_SCALAR, TensorKind.OPTIMIZER_NUMBER)
    counts = (reader.tensor(name) for kind in kinds for name in reader.names(kind))
    return max((int(count.read()) for count in counts if count.info.key == "step"), default=None)


def _list_tensors(folder: Path, as_json: bool) -> None:
    with CheckpointReader(folder) as reader:
        manifest = reader.manifest
    rows = [
        {
            "name": name,
            "kind": info.kind.value,
            "dtype": name_of(info.dtype, name),
            "shape": list(info.shape),
            "bytes": info.nbytes,
            "parts": len(manifest.parts[name]),
            "trainable": info.trainable if info.kind is TensorKind.PARAMETER else None,
        }
        for name, info in manifest.tensors.items()
    ]
    if as_json:
        _print_json({"checkpoint": str(folder), "tensors": rows, "aliases": dict(manifest.aliases)})
        return
    table = Table("name", "kind", "dtype", "shape", "size", title=Text(str(folder)))
    for row in rows:
        table.add_row(Text(row["name"]), row["kind"], row["dtype"], str(row["shape"]), _size(row["bytes"]))
    for alias, name in manifest.aliases.items():
        table.add_row(Text(alias), Text(f"same as {name}"), "", "", "")
    Console().print(table)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _shown(value: object) -> str:
    return "" if value is None else str(value)


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return ""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"

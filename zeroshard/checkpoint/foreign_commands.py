"""`zeroshard checkpoint export` and `import`: convert between zeroshard's checkpoints and those of other systems.

Progress goes to stderr, the result to stdout: a line of text or, with --json, a JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from zeroshard.bounded import read_bounded
from zeroshard.errors import UsageError

if TYPE_CHECKING:  # torch takes a while to import, and --help should not wait for it
    import torch

    from zeroshard.checkpoint.foreign.contents import Contents

_TAG = Annotated[str | None, typer.Option(help="Which checkpoint of the folder. [default: the newest]")]
_JSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class Format(str, Enum):
    """Formats of exports."""

    HF = "hf"
    DCP = "dcp"
    DCP_FLAT = "dcp-flat"


class Dtype(str, Enum):
    """Dtypes of exported parameters."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


def register(app: typer.Typer) -> None:
    """Add the commands to `zeroshard checkpoint`."""
    app.command("export")(export)
    app.command("import")(import_)


def export(
    directory: Annotated[
        Path, typer.Argument(help="Folder of checkpoints, or of one: zeroshard's, DeepSpeed's or DCP.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    tag: _TAG = None,
    format: Annotated[
        Format,
        typer.Option(
            help="hf: safetensors for from_pretrained. dcp: plain torch.distributed.checkpoint with optimizer "
            "state, keys as get_state_dict has them; dcp-flat: as torchtitan has them."
        ),
    ] = Format.HF,
    dtype: Annotated[Dtype, typer.Option(help="hf: of parameters; auto is what the forward computed in.")] = Dtype.AUTO,
    max_shard: Annotated[str, typer.Option(help="hf: of a file.")] = "5GB",
    config: Annotated[
        Path | None, typer.Option(help="hf: config.json, or its folder. [default: beside the checkpoint]")
    ] = None,
    frozen: Annotated[bool, typer.Option(help="hf: with parameters that were not trained.")] = True,
    as_json: _JSON = False,
) -> None:
    """Convert a checkpoint for other programs; takes memory for about two of its largest tensors."""
    from zeroshard.checkpoint.any_checkpoint import open_checkpoint
    from zeroshard.checkpoint.export.hf import DTYPES

    contents = open_checkpoint(directory, tag)
    if format is Format.HF:
        wanted = DTYPES.get(dtype.value)
        result = _export_hf(contents, directory, out, wanted, max_shard, config, frozen)
    else:
        if dtype is not Dtype.AUTO or config is not None or not frozen:
            raise UsageError(
                f"--format {format.value} writes masters and optimizer state; --dtype, --config and "
                "--no-frozen are for --format hf"
            )
        result = _export_dcp(contents, out, format)
    _record_export(directory, tag)
    _say(result, as_json, f"{result['tensors']} tensors, {result['bytes']:,} bytes, are in {out}")


def _record_export(directory: Path, tag: str | None) -> None:
    """Add a line to the audit log of a directory of zeroshard's checkpoints, if it has one."""
    from zeroshard.checkpoint.audit import Act, record
    from zeroshard.checkpoint.native import find_native

    folder = find_native(directory, tag)
    if folder is not None:
        folder = folder.resolve()
        record(folder.parent, Act.EXPORT, folder.name)


def import_(
    source: Annotated[Path, typer.Argument(help="Folder of DeepSpeed (ZeRO 1 to 3, universal) or DCP checkpoints.")],
    directory: Annotated[Path, typer.Argument(help="Folder of checkpoints to write into.")],
    tag: _TAG = None,
    name: Annotated[str | None, typer.Option("--as", help="Tag to write. [default: global_stepN]")] = None,
    universal_checkpoint_info: Annotated[
        Path | None,
        typer.Option(help="JSON on how DeepSpeed's tensor-parallel ranks were cut, in place of the checkpoint's own."),
    ] = None,
    masters_differ: Annotated[
        bool,
        typer.Option(
            "--masters-differ",
            help="Take DeepSpeed's master weights though they do not round to the weights of its model files.",
        ),
    ] = False,
    as_json: _JSON = False,
) -> None:
    """Convert a checkpoint of another system, with optimizer state and counters; no code in it is run."""
    from zeroshard.checkpoint.any_checkpoint import open_checkpoint
    from zeroshard.checkpoint.audit import Act, record
    from zeroshard.checkpoint.export.hf import total_bytes
    from zeroshard.checkpoint.native import write_native

    _refuse_source(source, directory)
    cuts = None if universal_checkpoint_info is None else _json_object(universal_checkpoint_info)
    contents = open_checkpoint(source, tag, cuts, masters_differ=masters_differ)
    tensors = {name: tensor for name, _, tensor in contents.tensors()}
    moments = {(n, key): value for n, p in contents.parameters.items() for key, value in p.moments.items()}
    total = total_bytes(tensors) + sum(total_bytes({key: value}) for (_, key), value in moments.items())
    with _progress("import", total) as progress:
        folder = write_native(contents, directory, f"global_step{contents.steps}" if name is None else name, progress)
    record(directory, Act.IMPORT, folder.name)
    result = {
        "folder": str(folder),
        "origin": contents.origin,
        "tensors": len(tensors) + len(moments),
        "bytes": total,
        "steps": contents.steps,
        "aliases": dict(contents.aliases),
        "left_out": list(contents.left_out),
    }
    _say(result, as_json, f"{contents.origin}: {result['tensors']} tensors, {total:,} bytes, are in {folder}")


def _refuse_source(source: Path, directory: Path) -> None:
    """Raise UsageError if an import would write among the files that it reads, whose `latest` it would replace."""
    read, written = source.resolve(), directory.resolve()
    if written in (read, read.parent):
        raise UsageError(
            f"{directory} holds the checkpoint to import ({source}), and its `latest` would be replaced; give another "
            "folder to write into"
        )


def _json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file that the user wrote. Raises UsageError, with its name."""
    try:
        value = json.loads(read_bounded(file))
    except RecursionError as error:
        raise UsageError(f"{file} can't be read as JSON: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{file} holds a {type(value).__name__}, not an object of JSON")
    return value


def _export_hf(
    contents: Contents,
    source: Path,
    out: Path,
    dtype: torch.dtype | None,
    max_shard: str,
    config: Path | None,
    frozen: bool,
) -> dict[str, Any]:
    from zeroshard.checkpoint.export.hf import CONFIG, export_hf, find_config, parse_size, total_bytes, weights_of

    if config is not None and config.is_dir():
        config = config / CONFIG
    if config is not None and not config.is_file():
        raise UsageError(f"--config {config}: there is no such file")
    total = total_bytes(weights_of(contents, dtype, frozen))
    with _progress("export", total) as progress:
        done = export_hf(contents, out, dtype, parse_size(max_shard), config or find_config(source), frozen, progress)
    return {
        "folder": str(done.folder),
        "origin": contents.origin,
        "files": list(done.files),
        "tensors": done.tensors,
        "parameters": done.parameters,
        "bytes": done.bytes,
        "dtype": done.dtype,
        "aliases": dict(done.aliases),
        "config": done.config,
        "left_out": list(contents.left_out),
    }


def _export_dcp(contents: Contents, out: Path, format: Format) -> dict[str, Any]:
    from zeroshard.checkpoint.export.dcp import export_dcp, state_dict_of
    from zeroshard.checkpoint.export.hf import total_bytes

    flat = format is Format.DCP_FLAT
    with _progress("export", total_bytes(state_dict_of(contents, flat)[1])) as progress:
        tensors, nbytes = export_dcp(contents, out, flat, progress)
    return {
        "folder": str(out),
        "origin": contents.origin,
        "tensors": tensors,
        "bytes": nbytes,
        "left_out": list(contents.left_out),
    }


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _say(result: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        print(json.dumps(result, indent=1))
        return
    print(text)
    for line in result["left_out"]:
        print(f"left out: {line}", file=sys.stderr)

"""Hugging Face's Trainer on zeroshard, on DeepSpeed and on FSDP2: one script, seconds and memory beside each other.

    python -m benchmarks.trainer [--deepspeed FOLDER] [--nproc 2] [--budget 500] [--output FOLDER]
    python -m benchmarks.trainer --rows zeroshard --size tiny --length 64        # tries it without a GPU

Every row is a run of benchmarks.trainer_row in processes of its own. `deepspeed` is the name of two packages, so each
process finds the one that its row is about:

    zeroshard           PYTHONPATH begins with compat/deepspeed/src of this checkout, and metadata for it
    deepspeed           PYTHONPATH begins with FOLDER, made by `pip install --target FOLDER deepspeed`
    fsdp2, ddp          neither

The interpreter itself should have no deepspeed. A row whose package is missing says so and leaves the others alone; so
does FSDP2 on a CPU, where accelerate offers only DDP.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.compare import device_count, run
from benchmarks.ranks import ROOT
from benchmarks.report import Outcome, add_limits, markdown_table, number, provenance, save, unmeasured

ROWS = ("zeroshard", "fsdp2", "deepspeed", "deepspeed --tuned")
COLUMNS = ("engine", "setting", "s/step", "tokens/s/GPU", "GiB", "reserved", "device GiB", "host GiB", "init s", "loss")
COMPAT = ROOT / "compat" / "deepspeed"


def environments(metadata: Path, deepspeed: Path | None) -> Callable[[str], Mapping[str, str]]:
    """For each engine the variables that let its processes find the right `deepspeed`.

    Args:
        metadata: an empty folder, which gets what `pip install ./compat/deepspeed` would leave for importlib.metadata.
        deepspeed: where the real one is installed; None takes what the interpreter has.
    """
    write_metadata(metadata)
    first = {"zeroshard": [COMPAT / "src", metadata], "deepspeed": [deepspeed] if deepspeed else []}

    def of(engine: str) -> Mapping[str, str]:
        path = [str(folder) for folder in [*first.get(engine, []), ROOT]]
        return {"PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])}

    return of


def write_metadata(folder: Path) -> None:
    """transformers and accelerate take a package for installed only if there is metadata of its name."""
    text = (COMPAT / "src" / "deepspeed" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^VERSION = "([^"]+)"', text, re.MULTILINE)
    assert found is not None
    version = found[1]
    made = folder / f"deepspeed-{version}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")


def cells(outcome: Outcome) -> list[str]:
    """A row of the table, in the order of COLUMNS."""
    row = outcome.row
    if row is None:
        return unmeasured(outcome, COLUMNS)
    engine = row["engine"] + (" tuned" if row["tuned"] else "")
    setting = f"{row['size']}, stage {row['stage']}, {row['batch']} x {row['length']}"
    return [
        engine,
        setting + (", checkpointing" if row["checkpointing"] else ""),
        number(row["step_s"], 4),
        number(row["tokens_s"], 0),
        number(row["allocated_gib"], 2),
        number(row["reserved_gib"], 2),
        number(row["device_gib"], 2),
        number(row["host_gib"], 1),
        number(row["init_s"], 1),
        number(row["loss"], 3),
    ]


def lines(outcomes: Sequence[Outcome], origin: dict[str, Any]) -> list[str]:
    """The table for benchmarks/README.md, with where it comes from below it."""
    row = next((outcome.row for outcome in outcomes if outcome.row is not None), {})
    versions = ", ".join(f"{name} {row.get(name, '')}" for name in ("torch", "transformers", "accelerate"))
    made = markdown_table(COLUMNS, map(cells, outcomes))
    where = f"Commit {origin['commit']}, {origin['world']} x {origin['card']}, {versions}, {origin['date']}"
    return [*made, "", f"{where}: `{origin['command']}`", ""]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="ROW", help='"ENGINE [options]"')
    parser.add_argument("--deepspeed", type=Path, metavar="FOLDER", help="where the real deepspeed was installed to")
    parser.add_argument("--nproc", type=int, help="ranks; by default one for each GPU")
    add_limits(parser, "trainer", budget=540.0, timeout=180.0, least=30.0)
    args, args.options = parser.parse_known_args(argv)
    return args


def main() -> int:
    args = parse()
    args.nproc = device_count() if args.nproc is None else args.nproc
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="metadata-") as folder:
        environment = environments(Path(folder), args.deepspeed)
        outcomes = run(args.rows, args, console, module="benchmarks.trainer_row", environment=environment)
    origin = provenance(args, outcomes, "trainer")
    text = "\n".join(lines(outcomes, origin))
    print(text)
    return save(args.output, "trainer", origin, outcomes, text)


if __name__ == "__main__":
    sys.exit(main())

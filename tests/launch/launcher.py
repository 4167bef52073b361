"""Run the `zeroshard` command on small scripts, as a process that is forked with torch in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, with the package importable from anywhere and nothing set that the launcher decides."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "LOGLEVEL")}
    return {**kept, "PYTHONPATH": str(ROOT), **(extra or {})}


def start(
    directory: Path, *words: str, stderr: int | None = None, env: Mapping[str, str] | None = None
) -> forked.Program:
    return forked.start(words, directory, environment(env), err=stderr == subprocess.PIPE)


def zeroshard(directory: Path, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    program = forked.start(words, directory, environment(env))
    out, err = program.communicate(timeout=120)
    return subprocess.CompletedProcess(words, program.wait(), out, err)


def script(directory: Path, text: str, name: str = "script.py") -> str:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return name

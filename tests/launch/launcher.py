"""Run the real `zeroshard` command on small scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, with the package importable from anywhere and nothing set that the launcher decides."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "LOGLEVEL")}
    return {**kept, "PYTHONPATH": str(ROOT), **(extra or {})}


def start(
    directory: Path, *words: str, stderr: int | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zeroshard", *words],
        cwd=directory,
        env=environment(env),
        text=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )


def zeroshard(directory: Path, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zeroshard", *words],
        cwd=directory,
        env=environment(env),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def script(directory: Path, text: str, name: str = "script.py") -> str:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return name

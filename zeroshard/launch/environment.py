"""Chooses the variables that the launcher sends to the nodes: an allow-list, names that were asked for, and files.

    launcher's environment --allow-list, --export--> |
    .zeroshard_env or .deepspeed_env  -------------> | one JSON line --> standard input of the node

Values are sent through a pipe and never as arguments, which every user of both machines can read (ps). The whole
environment is not sent: some variables are correct on one machine only, and some are secrets.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeroshard.bounded import read_bounded
from zeroshard.errors import UsageError

# Settings of networking and numerics that must be equal on all nodes, and where Python finds its modules.
ALLOWED = (
    "NCCL_*",
    "TORCH_*",
    "TORCHELASTIC_*",
    "PYTHON*",
    "GLOO_*",
    "UCX_*",
    "FI_*",
    "MV2_*",
    "MLFLOW_*",
    "OMP_*",
    "MKL_*",
    "KMP_*",
    "GOMP_*",
    "CUDA_*",
    "CUBLAS_*",
    "ZEROSHARD_*",
    "LD_LIBRARY_PATH",
    "LOGLEVEL",
)
# Correct on one node only, or set by each node's launcher.
_NEVER = (
    "CUDA_VISIBLE_DEVICES",
    "ZEROSHARD_RANK_FILES",
    "ZEROSHARD_JOB",
    "ZEROSHARD_CORES",
    "ZEROSHARD_RESTART",
)
# Variables that an allowed prefix matches, but that are secrets by their names.
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
FILES = (".zeroshard_env", ".deepspeed_env")


def exported(environ: Mapping[str, str], asked: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    """The variables for the nodes; a file's value has precedence over the launcher's.

    Args:
        asked: names or patterns (`HF_*`), which are sent even if they are in `_NEVER`.

    Raises:
        UsageError: a plain name is not set, or a file has a wrong line.
    """
    chosen: dict[str, str] = {}
    for name, value in environ.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in asked) or (
            name not in _NEVER
            and not _SECRET.search(name)
            and any(fnmatch.fnmatchcase(name, pattern) for pattern in ALLOWED)
        ):
            chosen[name] = value
    for name in asked:
        check_asked(name, environ)
    for path in files:
        chosen.update(read_file(path))
    return chosen


def check_asked(name: str, environ: Mapping[str, str]) -> None:
    """Raises UsageError for a name, not a pattern, that is not set."""
    if not re.search(r"[*?\[]", name) and name not in environ:
        raise UsageError(f"--export {name}: it is not set here")


def find_files(given: Path | None, places: Sequence[Path]) -> list[Path]:
    """`given`, else the first of FILES in the first of `places` that has one."""
    if given is not None:
        return [given]
    found = [place / name for place in places for name in FILES if (place / name).is_file()]
    return found[:1]


def read_file(path: Path) -> dict[str, str]:
    """The lines NAME=VALUE of a file, without empty lines and lines that begin with #. Raises UsageError."""
    try:
        lines = read_bounded(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the file of variables can't be read ({error})") from error
    values: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.removeprefix("export ").partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            # The message does not show the line, which may contain a secret.
            raise UsageError(f"{path}, line {number}: not of the form NAME=VALUE")
        values[name] = _unquoted(value)
    return values


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value

"""Which variables go from the launcher to the nodes: those of an allow-list, those asked for, those of files.

    launcher's environment --allow-list, --export--> |
    .zeroshard_env or .deepspeed_env  -------------> | one JSON line --> standard input of the node

Values travel on a pipe and never as arguments: arguments are public to every user of both machines (ps). The whole
environment is not sent: it holds what is true of one machine only, and secrets that the job does not need.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeroshard.bounded import read_bounded
from zeroshard.errors import UsageError

# Networking and numerics that must agree between nodes, and where Python finds its modules.
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
# True of one node only, or set anew by each node's launcher.
_NEVER = (
    "CUDA_VISIBLE_DEVICES",
    "ZEROSHARD_RANK_FILES",
    "ZEROSHARD_JOB",
    "ZEROSHARD_CORES",
    "ZEROSHARD_RESTART",
)
# Allowed by prefix, but what they hold by their names is for the launcher's user alone.
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
FILES = (".zeroshard_env", ".deepspeed_env")


def exported(environ: Mapping[str, str], asked: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    """Names and values for the nodes; a file's value stands above the launcher's, an asked-for name above `_NEVER`.

    `asked` are names or patterns (`HF_*`); UsageError if a plain name is not set, or a file has a wrong line.
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
    """The lines NAME=VALUE of a file; empty lines and lines that begin with # are skipped."""
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
            # Not the line itself: it may hold a secret.
            raise UsageError(f"{path}, line {number}: not of the form NAME=VALUE")
        values[name] = _unquoted(value)
    return values


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value

"""Reads and writes the files that options of the command line name; errors name the option."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeroshard.bounded import read_bounded
from zeroshard.errors import PlanError


def read_json(what: str, path: Path, *, absent: str = "") -> Any:
    """The JSON value in a file.

    Args:
        what: the option that named it, for errors.
        absent: what to do if there is no such file, added to the error.

    Raises:
        PlanError: it can't be read, or is not JSON.
    """
    try:
        return json.loads(read_bounded(path).decode())
    except FileNotFoundError as error:
        raise PlanError(f"{what}: no such file{absent}") from error
    except OSError as error:
        raise PlanError(f"{what}: can't be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise PlanError(f"{what}: nested too deep to be read") from error
    except ValueError as error:
        raise PlanError(f"{what}: not JSON ({error})") from error


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """A context in which a file is written. Raises PlanError with the option and the cause if that fails."""
    try:
        yield
    except OSError as error:
        raise PlanError(f"{option} {path}: can't be written: {error.strerror or error}") from error

"""Loads one of the package's native libraries (csrc/) through ctypes and checks that it is of this version.

Each library answers one function, `zeroshard_NAME_version`. Nothing is compiled when a program runs: where a library is
not there, can't be loaded or is another version's, its callers do the same in torch or Python.
"""

from __future__ import annotations

import ctypes
from pathlib import Path


def load_versioned(path: Path, name: str, version: int) -> tuple[ctypes.CDLL | None, str]:
    """The library NAME at `path`; or None, and why in words.

    Args:
        version: what its function must answer.
    """
    if not path.exists():
        return None, "no C++ compiler was there when zeroshard was installed; install one and zeroshard again"
    try:
        library = ctypes.CDLL(str(path))
        answers = library[f"zeroshard_{name}_version"]
        answers.restype = ctypes.c_int32
        found = answers()
    except (OSError, AttributeError) as error:
        return None, f"{path.name} can't be loaded ({error}); install zeroshard again"
    if found != version:
        return None, f"{path.name} is of another version of zeroshard ({found}, not {version}); install it again"
    return library, "native code"

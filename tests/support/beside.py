"""Packages that lie beside the environment: torchao, which Hugging Face's libraries import wherever they find it.

That takes seconds in every process that imports transformers, so `tools/venv` puts it into a folder of its own, and the
tests that need it reach there. Where it is installed as any other package, that one is taken.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_FOLDER = Path(sys.prefix) / "beside"


def use_beside() -> None:
    """Let this process import what lies beside its environment."""
    if str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))


needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None and not (_FOLDER / "torchao").is_dir(), reason="torchao is not installed"
)

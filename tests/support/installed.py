"""Skip a module of tests whose libraries are not installed, without an import of them.

`pytest.importorskip` imports: seconds for transformers or peft, in each pytest process, even where the tests that use
them are not run or run them in processes of their own.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def need(*names: str) -> None:
    """Skip the module that is being collected if one of these packages is not there."""
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)

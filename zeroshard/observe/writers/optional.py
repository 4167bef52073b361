"""Packages that only a monitor or the exporter needs: imported where the config asks for it, or an error that says so.

They are looked for before the model is sharded, so that a run fails in its first second and not after it has loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from zeroshard.errors import ConfigError


def optional_package(module: str, package: str, path: str) -> Any:
    """The module. Raises ConfigError with the package and the JSON path that asks for it where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{path}: needs the package {package}, which can't be imported here ({error}); run pip install {package}, "
            "or switch it off"
        ) from error

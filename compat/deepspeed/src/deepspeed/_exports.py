"""Names that are imported when they are first used, and an error that says more for all others.

Importing `deepspeed` is cheap that way: accelerate does it at every `unwrap_model`, whether ZeRO is used or not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from deepspeed._placeholders import PLACEHOLDERS, find_placeholder
from deepspeed._refusals import MissingNameError, refusal

Getter = Callable[[str], Any]


def lazy(module: str, names: Mapping[str, str]) -> tuple[Getter, Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module.

    Args:
        names: name -> "home:attribute", or "home" for a module itself.
    """
    # A module with a path is asked for submodules by `from module import name`, and so the refusal is heard.
    sys.modules[module].__dict__.setdefault("__path__", [])

    def get(name: str) -> Any:
        target = names.get(name)
        placeholder = find_placeholder(module, name) if target is None else None
        if placeholder is not None:
            setattr(sys.modules[module], name, placeholder)
            return placeholder
        if target is None and f"{module}.{name}" in PLACEHOLDERS:
            return import_module(f"{module}.{name}")
        if target is None:
            if name.startswith("__"):
                raise AttributeError(f"module {module!r} has no attribute {name!r}")
            raise MissingNameError(refusal(f"{module}.{name}"), name=name, obj=sys.modules[module])
        home, _, attribute = target.partition(":")
        value = import_module(home)
        if attribute:
            value = getattr(value, attribute)
        setattr(sys.modules[module], name, value)
        return value

    def names_of() -> list[str]:
        return sorted({*names, *PLACEHOLDERS.get(module, ()), *vars(sys.modules[module])})

    return get, names_of

"""What `import deepspeed.something` does where there is no such file.

Python replaces the message of an AttributeError after `from ... import` by its own, but asks for a submodule of the
name first; the finder of this file answers that: with a module of placeholders, or with what is said of a missing name.
It sees the names below `deepspeed.` only, after all other finders.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from deepspeed._placeholders import PLACEHOLDERS, PlaceholderModule
from deepspeed._refusals import MissingModuleError, refusal


class _Refuse(MetaPathFinder):
    """Comes after all other finders, so whatever it is asked for below `deepspeed.` has no file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in PLACEHOLDERS:
            return ModuleSpec(fullname, PlaceholderModule(), is_package=True)
        if fullname.startswith("deepspeed."):
            raise MissingModuleError(refusal(fullname), name=fullname)
        return None


def install() -> None:
    """Put the finder behind all others, once."""
    if not any(isinstance(finder, _Refuse) for finder in sys.meta_path):
        sys.meta_path.append(_Refuse())

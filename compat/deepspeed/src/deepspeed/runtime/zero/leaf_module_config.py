"""Which modules are gathered as a whole where the config does not say: zeroshard's defaults."""

from __future__ import annotations

from deepspeed._exports import lazy
from zeroshard.config.keys import key_table

_SECTION = "zero_optimization.leaf_module"


def _default(name: str) -> list[str]:
    default = key_table().keys[f"{_SECTION}.{name}"].default
    assert isinstance(default, list)
    return [str(entry) for entry in default]


DEFAULT_LEAF_MODULE_CLASSES = _default("classes")
DEFAULT_LEAF_MODULE_NAMES = _default("names")
DEFAULT_LEAF_MODULE_NAME_SUFFIXES = _default("name_suffixes")

__getattr__, __dir__ = lazy(__name__, {})

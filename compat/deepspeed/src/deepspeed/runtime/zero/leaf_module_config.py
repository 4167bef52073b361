"""Which modules are gathered as a whole where the config does not say: zeroshard's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass
class DeepSpeedZeroLeafModuleConfig:
    """The section leaf_module. A single name counts as a list of it."""

    classes: str | Sequence[str] = field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_CLASSES))
    names: str | Sequence[str] = field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_NAMES))
    name_suffixes: str | Sequence[str] = field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_NAME_SUFFIXES))

    def __post_init__(self) -> None:
        self.classes, self.names = _listed(self.classes), _listed(self.names)
        self.name_suffixes = _listed(self.name_suffixes)


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)

"""Leaf marks, with the attribute that tests of accelerate read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import zeroshard


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """As `zeroshard.set_z3_leaf_modules`; marked modules say so in `_z3_leaf`."""
    marked = zeroshard.set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)
    for module in marked:
        module.__dict__["_z3_leaf"] = True
    return marked

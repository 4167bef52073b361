"""Switches activation checkpointing on in a model that is traced: by the model's own method, or around every block."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroshard.sharding.units import UnitSpec


class Checkpointing(str, Enum):
    """Which activations are recomputed in the backward."""

    OFF = "off"
    ON = "on"
    """Each block keeps its inputs only; the backward recomputes it."""
    REENTRANT = "reentrant"
    """The same with a nested backward (use_reentrant=True), which also recomputes the block's last product."""


def enable(model: nn.Module, units: Sequence[UnitSpec], how: Checkpointing) -> None:
    """Switch checkpointing on, in place; `model` is the planner's own copy on the meta device."""
    if how is Checkpointing.OFF:
        return
    reentrant = how is Checkpointing.REENTRANT
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # transformers, newer and older
        switch: Any = getattr(model, name, None)
        if callable(switch):
            switch({"use_reentrant": reentrant})
            return
    for unit in units:
        module = model.get_submodule(unit.name)
        if unit.name and next(module.children(), None) is not None:
            # An attribute of this instance alone, so that hooks run as they do for the user's own wrapping.
            module.forward = partial(checkpoint, module.forward, use_reentrant=reentrant)

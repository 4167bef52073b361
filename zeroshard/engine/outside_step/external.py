"""Registers parameters that a module reads although another module owns them (DeepSpeed's external parameters)."""

from __future__ import annotations

import torch
from torch import nn

from zeroshard.arguments import need_kind
from zeroshard.engine.outside_step.gathered import place_of
from zeroshard.sharding.marks import add_external, remove_external


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Say that `module.forward` reads a parameter of another module, such as the embedding's weight in a head.

    Called by all ranks. Before shard(): a parameter that two units read becomes part of the root unit, which stays
    gathered for the whole pass. Later: its unit stays gathered for whole passes from the next step on. An external
    parameter that is not registered is gathered at its first read, and from the second step on for whole passes.
    """
    _check(module, parameter)
    place = place_of(parameter)
    if place is not None:
        handle, unit, _, _ = place
        owner = handle.runtime.model.get_submodule(unit.plan.name)
        if all(member is not module for member in owner.modules()):
            handle.runtime.reads.keep_gathered(unit.index)
    add_external(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Take `register_external_parameter` back, before shard(). Raises UsageError where it was not registered."""
    _check(module, parameter)
    remove_external(module, parameter)


def _check(module: object, parameter: object) -> None:
    need_kind(module, nn.Module, "external parameters", "an nn.Module")
    need_kind(parameter, torch.Tensor, "external parameters", "a parameter")

"""Parameters that a module reads though another module owns them: DeepSpeed's register_external_parameter."""

from __future__ import annotations

import torch
from torch import nn

from zeroshard.arguments import need_kind
from zeroshard.engine.outside_step.gathered import place_of
from zeroshard.sharding.marks import add_external, remove_external


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Say that `module.forward` reads a parameter of another module, such as the embedding's weight in a head.

    A parameter that two units read belongs to the root unit, which stays gathered for the whole pass. Once the model
    is sharded its unit stays gathered so from the next step on. Called by all ranks. What nobody registers is gathered
    when it is read, and so from the second step on.
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

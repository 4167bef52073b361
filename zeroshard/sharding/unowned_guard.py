"""Refuses a forward on parameters that are sharded but owned by no engine, and names the parameter.

Modules have the hook only while some of their own parameters are unowned (see unowned), so there is none in training.
Rejected: to explain torch's error afterwards, which some operations don't raise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.errors import UsageError
from zeroshard.sharding.opaque import reachable_parameters, takes_hooks
from zeroshard.sharding.resting import is_resting
from zeroshard.sharding.unowned import unowned_shard_of


@dataclass(frozen=True)
class _UnownedHook:
    """A forward pre-hook of a module.

    Attributes:
        path: path of the module in its model.
    """

    path: str

    def __call__(self, module: nn.Module, _args: object) -> None:
        """Raises UsageError where a parameter of the module itself is empty."""
        if torch.compiler.is_compiling():
            return  # it would cause a graph break
        for name, parameter in reachable_parameters(module):
            unowned = unowned_shard_of(parameter)
            if unowned is not None and is_resting(parameter):
                where = f"{self.path!r} ({type(module).__name__})" if self.path else f"the {type(module).__name__}"
                raise UsageError(
                    f"forward of {where}: its parameter {name!r} is sharded, and this rank holds only a part of it. "
                    "The model was built under an Init that shards and no engine has it yet, or its engine was closed "
                    "(engine.destroy(), zeroshard.close()). Call zeroshard.initialize() or shard() first, or run the "
                    "forward on all ranks inside zeroshard.GatheredParameters(model.parameters())"
                )


def guard_unowned(model: nn.Module) -> None:
    """Register the hook on modules of `model` that have unowned parameters of their own, and remove it from others."""
    for path, module in model.named_modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _UnownedHook)]:
            del hooks[key]
        if takes_hooks(module) and any(unowned_shard_of(parameter) for _, parameter in reachable_parameters(module)):
            module.register_forward_pre_hook(_UnownedHook(path), prepend=True)

"""A forward on parameters that are sharded and owned by no sharded model is refused by name.

The hook is on modules only while parameters of their own have no owner (see unowned): in training there is none.
Rejected: explaining torch's error about an empty tensor afterwards, which some operations don't raise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.errors import UsageError
from zeroshard.sharding.resting import is_resting
from zeroshard.sharding.unowned import unowned_shard_of
from zeroshard.sharding.whole import reachable_parameters, takes_hooks


@dataclass(frozen=True)
class _UnownedHook:
    """A pre-forward hook of a module.

    Attributes:
        path: of the module in its model.
    """

    path: str

    def __call__(self, module: nn.Module, _args: object) -> None:
        """Raises UsageError where a parameter of the module itself is empty."""
        if torch.compiler.is_compiling():
            return  # a hook in compiled code would cut it in two
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
    """Put the hook on modules of `model` that have unowned parameters of their own, and take it off all others."""
    for path, module in model.named_modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _UnownedHook)]:
            del hooks[key]
        if takes_hooks(module) and any(unowned_shard_of(parameter) for _, parameter in reachable_parameters(module)):
            module.register_forward_pre_hook(_UnownedHook(path), prepend=True)

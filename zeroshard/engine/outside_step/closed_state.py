"""`state_dict()` of a closed model: refuses sharded parameters, or gives their names and shapes, as before the close.

These parameters are empty after the close, and torch would save them empty without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from zeroshard.engine.memory.guard import sharded_value
from zeroshard.errors import UsageError
from zeroshard.sharding.opaque import reachable_parameters, takes_hooks
from zeroshard.sharding.resting import is_resting
from zeroshard.sharding.unowned import unowned_shard_of


@dataclass  # torch sets an attribute on it
class _ClosedState:
    """A hook of a module, called with its part of the state dict.

    Attributes:
        names: whether it gives placeholders with name and shape instead of an error.
    """

    names: bool

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        """Raises UsageError, or inserts a placeholder, for each empty parameter of the module itself."""
        for name, parameter in reachable_parameters(module):
            unowned = unowned_shard_of(parameter)
            if unowned is None or not is_resting(parameter) or f"{prefix}{name}" not in state:
                continue
            if not self.names:
                raise UsageError(
                    f"state_dict(): parameter {f'{prefix}{name}'!r} is sharded and empty here, its engine was closed "
                    "(engine.destroy(), zeroshard.close()). Call it on all ranks inside "
                    "zeroshard.GatheredParameters(model.parameters()), or save before closing"
                )
            state[f"{prefix}{name}"] = sharded_value(parameter.dtype, unowned.shape)


def guard_closed_state(model: nn.Module, *, names: bool) -> None:
    """Put the hook on modules that have sharded parameters of their own."""
    unguard_closed_state(model)
    for module in model.modules():
        if takes_hooks(module) and any(unowned_shard_of(parameter) for _, parameter in reachable_parameters(module)):
            module.register_state_dict_post_hook(_ClosedState(names))


def unguard_closed_state(model: nn.Module) -> None:
    """Take the hook off all modules."""
    for module in model.modules():
        hooks = module._state_dict_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _ClosedState)]:
            del hooks[key]

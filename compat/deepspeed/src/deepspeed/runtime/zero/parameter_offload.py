"""What TRL reaches for around a generation inside GatheredParameters: the hooks of ZeRO-3, to be taken off for it.

Ours stay where they are: inside the block a forward uses what the block holds, and gathers nothing again. What scripts
find in their place says only whether they have taken them off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {})


class NamedParameters:
    """The parameters of a module under the calls that TRL makes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return self._module.named_parameters(recurse=recurse)

    def ds_external_parameters(self) -> tuple[Any, ...]:
        """None: a parameter that other modules read is in the root unit."""
        return ()


class Hook:
    """Stands for a hook that need not be taken off."""

    def remove(self) -> None:
        """Does nothing."""


class ParameterOffload:
    """The hooks that a script takes off before a generation and registers again after it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = NamedParameters(module)
        self._register_deepspeed_module(self.module)

    def _register_deepspeed_module(self, module: NamedParameters) -> None:
        self.forward_hooks = [Hook()]
        self.backward_hooks = [Hook()]

    def take_off(self) -> None:
        """No hooks are registered."""
        self.forward_hooks, self.backward_hooks = [], []

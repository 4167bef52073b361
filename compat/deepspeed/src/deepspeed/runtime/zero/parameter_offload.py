"""What TRL reaches for around a generation inside GatheredParameters: the hooks of ZeRO-3, to be taken off for it.

Ours stay where they are: inside the block a forward uses what the block holds, and gathers nothing again.
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


class ParameterOffload:
    """The lists of hooks are empty; registering them again does nothing."""

    def __init__(self, module: nn.Module) -> None:
        self.module = NamedParameters(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: NamedParameters) -> None:
        """Nothing was taken off."""

"""peft's AdaLoRA: it reads its adapters and their gradients after the step, and masks some of them.

    engine.step()                    model.update_and_allocate(step)                    next forward, zero_grad, save
      | gradients are kept             | safe_get_full_grad(p), p.masked_fill_(...)        | changes are kept
      | sharded adapters become whole  |                                                   | adapters rest again

Under torch the gradients are there until `zero_grad`; here the step consumes them, so copies are handed out. AdaLoRA's
forward also reads all adapters outside of their layers (A and B are to be orthogonal), so they belong to the root unit,
which is whole for the whole pass. DeepSpeed hands out what lies in its buffers after the step at stage 3 and refuses at
stages 1 and 2. Keeping the gradients of every model was rejected: it costs a copy of all of them.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import zeroshard
from zeroshard.engine.outside_step.gathered import GatheredParameters, place_of

_KEPT = "_zeroshard_kept_gradient"
"""On an adapter between the step and what follows it: its gradient, as the step applied it."""


def find_adapters(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters of AdaLoRA in a model; peft need not be installed."""
    layers = sys.modules.get("peft.tuners.adalora.layer")
    if layers is None:
        return []
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, layers.AdaLoraLayer):
            kinds = (module.get_submodule(name) for name in ("lora_A", "lora_E", "lora_B"))
            found |= {id(p): p for kind in kinds for p in kind.parameters() if p.requires_grad}
    return list(found.values())


def kept_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient of an adapter after its step, clipped as the step did it."""
    return vars(param).get(_KEPT)


class AdaptersBetweenSteps:
    """Lets AdaLoRA read and change its adapters after each step.

    Args:
        adapters: parameters of a sharded model.
    """

    def __init__(self, model: nn.Module, adapters: list[nn.Parameter]) -> None:
        self._adapters = adapters
        self._sharded = [p for p in adapters if (place := place_of(p)) is not None and place[2].plan.param.divided]
        self._open: GatheredParameters | None = None
        members = {id(adapter) for adapter in adapters}
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(lambda *_: self.close(), prepend=True)
            for module in model.modules()
            if members <= {id(parameter) for parameter in module.parameters()}
        ]

    def before_step(self) -> None:
        """Keep the gradients; called by all ranks, like all of these."""
        self.close()
        for adapter in self._adapters:
            vars(adapter)[_KEPT] = zeroshard.safe_get_full_grad(adapter)

    def after_step(self, clipped: float) -> None:
        """The step has applied the gradients times `clipped`: show the adapters."""
        for adapter in self._adapters:
            gradient = vars(adapter)[_KEPT]
            if gradient is not None and clipped != 1.0:
                gradient.mul_(clipped)
        self._open = GatheredParameters(self._sharded, modifier_rank=0)
        self._open.__enter__()

    def close(self) -> None:
        """Take over what was changed, and forget the gradients."""
        for adapter in self._adapters:
            vars(adapter).pop(_KEPT, None)
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def destroy(self) -> None:
        """Close, and leave the model."""
        self.close()
        for hook in self._hooks:
            hook.remove()

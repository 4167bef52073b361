"""Lets bitsandbytes' 8-bit layers (LLM.int8) read their codes where the engine keeps them.

    as made        weight.data, weight.CB: the codes; the first forward moves CB and the scales SCB to layer.state
    sharded        layer.state.CB: weight.data of this forward, set before each; the scales stay in layer.state

The layer's forward and backward read `state.CB`, not the weight. A view of the weight stays right until the backward,
since a unit is gathered into the same memory again. Layers are recognized by the class of their weight; the package
itself is not imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeroshard.sharding.resting import whole_class


class _ReadsCodes:
    """A forward pre-hook of an 8-bit layer."""

    def __call__(self, module: nn.Module, _args: object) -> None:
        weight = module.weight
        if isinstance(weight, torch.Tensor) and _is_codes(weight) and vars(weight)["CB"] is None:
            vars(module)["state"].CB = weight.data


def read_int8_codes(model: nn.Module, device: torch.device) -> None:
    """Let the 8-bit layers of `model` read the codes of their weight in each forward, and drop their second copy.

    Args:
        device: where the scales have to be, which are whole on each rank.
    """
    for module in model.modules():
        weight = dict(module._parameters.items()).get("weight")  # scripted modules have another kind of dict
        if weight is None or not _is_codes(weight) or "state" not in vars(module):
            continue
        state: Any = vars(module)["state"]
        scales = state.SCB if vars(weight)["SCB"] is None else vars(weight)["SCB"]
        if scales is None:
            continue
        state.CB, state.SCB = None, scales.to(device)
        vars(weight).update(CB=None, SCB=None)
        if not any(isinstance(hook, _ReadsCodes) for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(_ReadsCodes())


def drop_int8_codes(model: nn.Module) -> None:
    """Let 8-bit layers forget the memory of a closed engine; each forward sets it anew."""
    for module in model.modules():
        if any(isinstance(hook, _ReadsCodes) for hook in module._forward_pre_hooks.values()):
            vars(module)["state"].CB = None


def _is_codes(weight: torch.Tensor) -> bool:
    """Whether a parameter is one of bitsandbytes' in 8 bits, quantized."""
    kind = whole_class(weight)
    named = kind.__name__ == "Int8Params" and kind.__module__.startswith("bitsandbytes.")
    return named and weight.dtype is torch.int8

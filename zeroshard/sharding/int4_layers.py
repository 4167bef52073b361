"""Lets bitsandbytes' 4-bit layers keep their codes in the order in which they were sharded.

On a processor with AVX-512 BF16 such a layer packs its codes anew, in another shape, in the first forward outside of
training: an evaluation between two steps. Layers are recognized by the class of their weight; the package itself is
not imported. A closed model keeps this, and computes with the package's other kernel.
"""

from __future__ import annotations

import torch
from torch import nn

from zeroshard.sharding.resting import whole_class

_PACKS = "support_avx512bf16_for_cpu"


def keep_int4_codes(model: nn.Module) -> None:
    """Let no 4-bit layer of `model` pack its codes anew."""
    for module in model.modules():
        weight = dict(module._parameters.items()).get("weight")  # scripted modules have another kind of dict
        if weight is not None and _is_codes(weight) and _PACKS in vars(module):
            vars(module)[_PACKS] = False


def _is_codes(weight: torch.Tensor) -> bool:
    """Whether a parameter is one of bitsandbytes' in 4 bits."""
    kind = whole_class(weight)
    return kind.__name__ == "Params4bit" and kind.__module__.startswith("bitsandbytes.")

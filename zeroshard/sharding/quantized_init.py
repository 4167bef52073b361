"""A context in which the codes of a quantized model are sharded as they are loaded.

    with QuantizedInit():
        from_pretrained(..., quantization_config=...)      each weight is quantized whole; then each rank keeps a part

transformers loads quantized models without `zero.Init`, whole on each rank. It makes one weight after the other and
sets it in its module, which torch tells a hook; so a rank never holds more codes than its share and those of a few
weights. Other parameters (embeddings, norms) stay whole until `shard` or `initialize`, since libraries convert them
afterwards. All ranks have to load the same model. Rejected: to let `Init` do it, which records what is computed and
replays it later, so that all tensors of the files would be kept until its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from zeroshard.cluster import rank_place
from zeroshard.errors import UsageError
from zeroshard.sharding.kept import CODES, Inner, KeptAsIs, inner_tensors, is_composed, scales_of
from zeroshard.sharding.resting import is_resting
from zeroshard.sharding.unowned import shard_unowned
from zeroshard.sharding.unowned_guard import guard_unowned

_STATE = "quant_state"
"""Attribute of bitsandbytes' 4-bit weights: None until they are quantized."""


class QuantizedInit:
    """Inside, codes of frozen weights are divided among all ranks as soon as they are set in a module.

    Codes are parameters of whole numbers or 8-bit floats, parameters made of other tensors, and bitsandbytes' 4-bit
    weights in any storage. `shard` and `initialize` take the model; before them GatheredParameters reads the weights.

    Raises:
        UsageError: there is no process group, though the process is one of several.
    """

    def __init__(self) -> None:
        self._hook: RemovableHandle | None = None
        self._modules: dict[int, nn.Module] = {}

    def __enter__(self) -> QuantizedInit:
        joined = dist.is_available() and dist.is_initialized()
        place = None if joined else rank_place(os.environ)  # what a launcher said counts only until the ranks have met
        if place is not None and place.world_size > 1:
            raise UsageError(
                f"QuantizedInit: this is one of {place.world_size} processes, but there is no process group; call "
                "zeroshard.init_distributed() before"
            )
        self._hook = register_module_parameter_registration_hook(self._set)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
        for module in self._modules.values():
            guard_unowned(module)
        self._modules = {}

    def _set(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """torch calls this before it sets a parameter of a module."""
        if parameter is None or parameter.requires_grad or is_resting(parameter) or parameter.is_meta:
            return
        title = f"{type(module).__name__}.{name}"
        if is_composed(parameter):
            self._divide(inner_tensors(name, parameter), title)
        elif _is_quantized(parameter):
            self._divide(scales_of(name, parameter), title)
            shard_unowned(parameter, parameter.data, title)
        else:
            return
        self._modules[id(module)] = module

    def _divide(self, tensors: Iterable[Inner], title: str) -> None:
        for inner in list(tensors):
            if not isinstance(inner.tensor, KeptAsIs):
                kept = KeptAsIs(inner.tensor.detach().as_subclass(torch.Tensor), requires_grad=False)
                inner.put(kept)
                shard_unowned(kept, kept.data, title)


def _is_quantized(parameter: nn.Parameter) -> bool:
    own = vars(parameter)
    if _STATE in own:
        return own[_STATE] is not None
    if parameter.dtype not in CODES or not parameter.numel():
        return False
    if own.get("CB") is not None:
        own["CB"] = None  # a second name of the codes (see int8_layers)
    return True

"""An `Init` after which every rank holds its share of each parameter: what `deepspeed.zero.Init` leaves behind.

    Init             parameters stay on the tape until the model is sharded; the master weights are exact
    ShardedInit      parameters are made one by one when the context ends, and each rank keeps its part (see loose)

The second is for code that goes on to fill the parameters itself, inside GatheredParameters, before `initialize`: the
loading of a pretrained model on one rank. Rejected for everybody: a tape is cheaper where nobody fills them.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zeroshard.sharding.deferred import Init, fill_in_place, materialize
from zeroshard.sharding.deferred_calls import active_tape
from zeroshard.sharding.loose import shard_loosely
from zeroshard.sharding.loose_guard import guard_loose
from zeroshard.sharding.overlap import refuse_shared_memory


class ShardedInit(Init):
    """As `Init`; at the end parameters are empty, sharded over the default process group, and can be gathered.

    Only the outermost of nested contexts shards. A context that ends in an exception shards nothing.

    Args:
        param_dtype: of all floating parameters afterwards; None leaves each its own.
        options: those of `Init`.
    """

    def __init__(self, *, param_dtype: torch.dtype | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._param_dtype = param_dtype
        self._modules: dict[int, nn.Module] = {}
        self._hooks = ExitStack()
        self._outermost = False

    def __enter__(self) -> ShardedInit:
        self._outermost = self.enabled and active_tape() is None
        super().__enter__()
        if self._outermost:
            for register in (
                register_module_parameter_registration_hook,
                register_module_buffer_registration_hook,
                register_module_module_registration_hook,
            ):
                self._hooks.callback(register(self._note).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        super().__exit__(kind, error, trace)
        modules, self._modules = list(self._modules.values()), {}
        if self._outermost and kind is None:
            inner = {id(part) for module in modules for part in module.modules() if part is not module}
            roots = [module for module in modules if id(module) not in inner]
            for root in roots:
                refuse_shared_memory(root)  # it can't be seen any more once each parameter has a shard of its own
            materialize(nn.ModuleList(modules), None, self._keep)
            for root in roots:
                guard_loose(root)

    def _note(self, module: nn.Module, _name: str, _member: object) -> None:
        self._modules[id(module)] = module

    def _keep(self, name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not isinstance(tensor, nn.Parameter):
            fill_in_place(name, tensor, value)
            return
        dtype = self._param_dtype if self._param_dtype is not None and value.is_floating_point() else value.dtype
        value = value.to(dtype)
        fill_in_place(name, tensor, value.new_empty(0))
        shard_loosely(tensor, value)

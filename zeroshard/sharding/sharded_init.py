"""An `Init` after which every rank has its shard of each parameter, as after `deepspeed.zero.Init`.

    Init             parameters stay on the tape until the model is sharded; the master weights are exact
    ShardedInit      parameters are made one by one when the context ends, and each rank keeps its shard (see unowned)

ShardedInit is for code that sets the parameters itself, inside GatheredParameters, before `initialize`, as when one
rank loads a pretrained model. It is not the default, since Init is cheaper where parameters are not set that way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zeroshard.comm.together import gather_from_all
from zeroshard.errors import UsageError
from zeroshard.sharding.deferred.calls import active_tape, active_watcher, suspended
from zeroshard.sharding.deferred.init import Init, fill_in_place, materialize
from zeroshard.sharding.resting import is_resting, name_resting
from zeroshard.sharding.shared_memory import refuse_shared_memory
from zeroshard.sharding.unowned import shard_unowned
from zeroshard.sharding.unowned_guard import guard_unowned

_REMEDY = (
    "a model that is built under such an Init (deepspeed.zero.Init) is divided among all ranks, so all of them have to "
    "build it. Build a model for one rank alone outside of it, or inside Init(enabled=False)"
)


class ShardedInit(Init):
    """As `Init`; at its end parameters are sharded over the default process group and can be gathered.

    All ranks get the values of rank 0, as when a whole model is sharded: ranks may have drawn other random numbers, and
    weights may be set on rank 0 only. All ranks must leave the context together. Only the outermost of nested contexts
    shards; `outside_of_init` shards a model that is needed earlier. A context that ends in an exception shards nothing.

    Args:
        param_dtype: dtype of all floating parameters afterwards; None does not change dtypes.
        remote_device: with "cpu" or "nvme" each rank's shard is in host memory until `initialize` or `shard`.
        options: those of `Init`.

    Raises:
        UsageError: at the end of the context, if ranks have built other parameters, or one did not build the model.
        PlanError: at the end of the context, if two tensors of the model share memory.
    """

    def __init__(
        self, *, param_dtype: torch.dtype | None = None, remote_device: str | None = None, **options: Any
    ) -> None:
        super().__init__(remote_device=remote_device, **options)
        self._param_dtype = param_dtype
        self._on_host = remote_device in ("cpu", "nvme")
        self._modules: dict[int, nn.Module] = {}
        self._members: list[nn.Parameter] = []
        self._shapes: list[torch.Size] = []
        self._numbers: dict[int, int] = {}
        self._hooks = ExitStack()
        self._outermost = False

    def __enter__(self) -> ShardedInit:
        self._outermost = self.enabled and active_tape() is None
        super().__enter__()
        if self.enabled:
            for register in (
                register_module_parameter_registration_hook,
                register_module_buffer_registration_hook,
                register_module_module_registration_hook,
            ):
                self._hooks.callback(register(self._record_module).remove)
        watcher = active_watcher()
        if self._outermost and watcher is not None:
            watcher.finish_model = self._finish_model
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        super().__exit__(kind, error, trace)
        modules, self._modules = list(self._modules.values()), {}
        if self._outermost and kind is None:
            self._shard_built(modules)
        elif kind is None:
            self._on_inner_exit(modules)

    def _on_inner_exit(self, modules: list[nn.Module]) -> None:
        """An inner context, in which `modules` were built, has ended; the outermost context will shard them."""

    def _finish_model(self, model: nn.Module) -> None:
        """Shard what was built of a model now; the end of this context does not shard it again."""
        inside = {id(module) for module in model.modules()}
        modules = [module for module in self._modules.values() if id(module) in inside]
        for module in modules:
            del self._modules[id(module)]
        self._shard_built(modules)

    def _shard_built(self, modules: list[nn.Module]) -> None:
        inner = {id(part) for module in modules for part in module.modules() if part is not module}
        roots = [module for module in modules if id(module) not in inner]
        for root in roots:
            refuse_shared_memory(root)  # checked here, since it is not visible once each parameter has its own shard
        built = nn.ModuleList(modules)
        self._members = [parameter for parameter in built.parameters() if parameter.is_meta]
        self._shapes = [member.shape for member in self._members]
        self._numbers = {id(member): number for number, member in enumerate(self._members)}
        _check_same(self._members, self.device)
        materialize(built, None, self._shard_value)
        self._receive_values()
        for root in roots:
            guard_unowned(root)
            for name, parameter in root.named_parameters():
                if is_resting(parameter):
                    name_resting(parameter, name)

    def _record_module(self, module: nn.Module, _name: str, _member: object) -> None:
        if active_watcher() is not None:
            self._modules[id(module)] = module

    def _shard_value(self, name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not isinstance(tensor, nn.Parameter):
            fill_in_place(name, tensor, value)
            return
        dtype = self._param_dtype if self._param_dtype is not None and value.is_floating_point() else value.dtype
        value = value.to(dtype)
        fill_in_place(name, tensor, value.new_empty(0))
        if not _several_ranks():
            shard_unowned(tensor, value, name, on_host=self._on_host)
        elif dist.get_rank() == 0:
            _broadcast(torch.tensor([self._numbers[id(tensor)]], device=value.device))
            shard_unowned(tensor, _broadcast(value), name, on_host=self._on_host)

    def _receive_values(self) -> None:
        """On ranks other than 0, receive rank 0's parameters, in its order, which may differ from this rank's."""
        members, self._members = self._members, []
        if not _several_ranks() or dist.get_rank() == 0:
            return
        for _ in members:
            number = int(_broadcast(torch.zeros(1, dtype=torch.int64, device=self.device)))
            shape, empty = self._shapes[number], members[number]
            value = _broadcast(torch.empty(shape, dtype=empty.dtype, device=self.device))
            shard_unowned(empty, value, on_host=self._on_host)


@contextmanager
def outside_of_init(model: nn.Module | None) -> Iterator[None]:
    """Inside, tensors are real, and `model`, though built under an `Init` that is still open, is as after its end."""
    watcher = active_watcher()
    with suspended():
        if watcher is not None and watcher.finish_model is not None and model is not None:
            watcher.finish_model(model)
        yield


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _broadcast(value: torch.Tensor) -> torch.Tensor:
    """Rank 0's values, sent as bytes, since gloo does not support all dtypes."""
    sent = value.detach().contiguous()
    if sent.numel():
        dist.broadcast(sent.view(-1).view(torch.uint8), 0)
    return sent


def _check_same(members: list[nn.Parameter], device: torch.device) -> None:
    """Raises UsageError on all ranks unless all have built parameters of the same shapes and dtypes."""
    if not _several_ranks():
        return
    shapes = [f"{tuple(member.shape)} {member.dtype}" for member in members]
    digest = hashlib.sha256("\n".join(shapes).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    others = gather_from_all(own, "the end of an Init that shards", _REMEDY)
    different = [rank for rank, other in enumerate(others) if not torch.equal(other, others[0])]
    if different:
        raise UsageError(
            f"ranks {different} have built other parameters under Init than rank 0 (this rank: {len(shapes)} of them): "
            "shapes, dtypes and order must be equal on all ranks, though values need not be"
        )

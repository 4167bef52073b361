"""deepspeed.zero.Init and GatheredParameters, as transformers, peft and TRL use them.

Under ZeRO-3 transformers builds a model inside `Init`, and fills it afterwards, module by module, inside
GatheredParameters with modifier_rank=0. So this Init leaves sharded parameters behind, not a tape.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from deepspeed import _config
from deepspeed._exports import lazy
from deepspeed._parameters import ZeroParamStatus, announce, describe, enables_checks, is_checked, is_described
from zeroshard.cluster import rank_place
from zeroshard.engine.build import default_device
from zeroshard.engine.outside_step.gathered import ChangePolicy
from zeroshard.engine.outside_step.gathered import GatheredParameters as _Gathered
from zeroshard.sharding.sharded_init import ShardedInit
from zeroshard.sharding.unowned import shard_unowned

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "zero_wrapper_for_fp_tensor_constructor"]

_orig_torch_arange = torch.arange

__getattr__, __dir__ = lazy(__name__, {"get_accelerator": "deepspeed.accelerator:get_accelerator"})


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype, target_device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """`fn` itself: no constructor of torch is replaced here. transformers puts another one in its place for a while."""
    return fn


class Init(ShardedInit):
    """Context in which models are built sharded. Floating parameters have the config's dtype afterwards.

    Args:
        module: an existing model, which is sharded at once; the context is not needed then.
        config_dict_or_path, config: say whether bf16 or fp16 is enabled; everything else may still be "auto".
        enabled: False makes this a context that does nothing.
        dtype: instead of the config's.
        remote_device: "cpu" or "nvme" keeps each rank's part in host memory until `initialize`, whose offload_param
            says where it rests then.
        others: as those of `zeroshard.Init`, which refuses what it does not obey.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: object = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
        **others: Any,
    ) -> None:
        if enabled and not dist.is_initialized() and rank_place(os.environ, 29500) is not None:
            zeroshard.init_distributed()
        super().__init__(
            param_dtype=dtype or _dtype(config_dict_or_path if config_dict_or_path is not None else config),
            data_parallel_group=data_parallel_group,
            remote_device=remote_device,
            pin_memory=pin_memory,
            enabled=enabled,
            mpu=mpu,
            device=default_device(),
            **others,
        )
        self._built: list[nn.Parameter] = []
        source = config_dict_or_path if config_dict_or_path is not None else config
        self._checked = source is not None and enables_checks(_config.read(source).root)
        if module is not None and enabled:
            self._shard(module)

    def _shard_built(self, modules: list[nn.Module]) -> None:
        super()._shard_built(modules)
        describe(self._built, checked=self._checked)
        self._built.clear()

    def _on_inner_exit(self, modules: list[nn.Module]) -> None:
        announce(parameter for module in modules for parameter in module.parameters())

    def _shard_value(self, name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
        super()._shard_value(name, tensor, value)
        if isinstance(tensor, nn.Parameter):
            self._built.append(tensor)

    def _shard(self, module: nn.Module) -> None:
        device = default_device()
        for name, parameter in module.named_parameters():
            value = parameter.data.to(device)
            if value.is_floating_point() and self._param_dtype is not None:
                value = value.to(self._param_dtype)
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(value, 0)
            shard_unowned(parameter, value, name, on_host=self._on_host)
        describe(module.parameters(), checked=self._checked)


class GatheredParameters(_Gathered):
    """As `zeroshard.GatheredParameters`; changes without a modifier_rank are no error.

    At stage 3 they are dropped, with a warning; at stages 0 to 2, where DeepSpeed's does nothing, they are kept on the
    rank that made them. They are refused where the config of a parameter says `zero_optimization.enable_sanity_checks`.

    Args:
        params: may hold None, buffers and plain tensors, which are left alone.
    """

    without_modifier = ChangePolicy.RESTORE

    def __init__(
        self,
        params: nn.Module | torch.Tensor | Iterable[torch.Tensor | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        super().__init__(params, modifier_rank, fwd_module, enabled)
        if any(is_checked(member) for member in self._members):
            self.without_modifier = ChangePolicy.REFUSE

    def _keeps_anyway(self, member: torch.Tensor) -> bool:
        return self._drops and not is_described(member)


def _dtype(config: Any) -> torch.dtype:
    """The dtype of floating parameters: bf16 or fp16 where one is enabled for certain, else fp32."""
    if config is None:
        return torch.float32
    values = _config.read(config).root
    for section, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        inner = values.get(section)
        if isinstance(inner, Mapping) and inner.get("enabled") is True:
            return dtype
    return torch.float32

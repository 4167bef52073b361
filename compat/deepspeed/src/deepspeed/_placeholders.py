"""Names of DeepSpeed that can be imported though nothing stands behind them yet.

Scripts import the class of a mixture of experts, the wrapper of an fp16 optimizer or a part of ZeRO-3's machinery at
their head and use them in one branch only, or in an `isinstance`. So each name below is a class that has no instances:
imports, `isinstance` and subclasses work, and a call ends in an error that names it. To refuse the import, as for every
other unknown name, would end scripts that never come to the call.
"""

from __future__ import annotations

from importlib.abc import Loader
from types import ModuleType
from typing import Any, NoReturn

from deepspeed._refusals import refusal

_LINEAR = ("LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "zero3_linear_wrap")

PLACEHOLDERS: dict[str, tuple[str, ...]] = {
    "deepspeed.checkpoint": ("DeepSpeedCheckpoint",),
    "deepspeed.checkpoint.utils": ("get_model_ckpt_name_for_rank",),
    "deepspeed.linear": ("LoRAConfig", "OptimizedLinear", "QuantizationConfig"),
    "deepspeed.monitor.comet": ("CometMonitor",),
    "deepspeed.monitor.csv_monitor": ("csvMonitor",),
    "deepspeed.monitor.tensorboard": ("TensorBoardMonitor",),
    "deepspeed.monitor.wandb": ("WandbMonitor",),
    "deepspeed.runtime.bf16_optimizer": ("BF16_Optimizer",),
    "deepspeed.runtime.comm": (),
    "deepspeed.runtime.comm.coalesced_collectives": ("all_to_all_quant_reduce", "reduce_scatter_coalesced"),
    "deepspeed.runtime.fp16": (),
    "deepspeed.runtime.fp16.fused_optimizer": ("FP16_Optimizer",),
    "deepspeed.runtime.fp16.onebit": ("OnebitAdam", "OnebitLamb", "ZeroOneAdam"),
    "deepspeed.runtime.fp16.onebit.adam": ("OnebitAdam",),
    "deepspeed.runtime.fp16.onebit.lamb": ("OnebitLamb",),
    "deepspeed.runtime.fp16.onebit.zoadam": ("ZeroOneAdam",),
    "deepspeed.runtime.fp16.unfused_optimizer": ("FP16_UnfusedOptimizer",),
    "deepspeed.runtime.progressive_layer_drop": ("ProgressiveLayerDrop",),
    "deepspeed.runtime.sparse_tensor": ("SparseTensor",),
    "deepspeed.runtime.torch_autocast": ("PARAM_COMM_DTYPE_ATTR_NAME", "get_comm_dtype", "has_comm_dtype"),
    "deepspeed.runtime.zero": ("MiCS_Init",),
    "deepspeed.runtime.zero.linear": _LINEAR,
    "deepspeed.runtime.zero.offload_states": ("get_state_devices",),
    "deepspeed.runtime.zero.parameter_offload": ("ZeROOrderedDict", "ensure_zero_ordered_dict"),
    "deepspeed.runtime.zero.partition_parameters": (
        "CUDAQuantizer",
        "InsertPostInitMethodToModuleSubClasses",
        "MultipleAllGatherHandles",
        "get_allgather_dtype",
        "partitioned_param_data_shape",
        "zero3_linear_wrap",
    ),
}
"""Module -> the names of it that are such classes."""


class Placeholder(type):
    """The kind of these classes: neither they nor what is derived from them has instances.

    Attributes:
        refused: the dotted name that the class stands for.
    """

    refused: str

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        from zeroshard.errors import UsageError  # importing deepspeed alone does not import torch

        raise UsageError(refusal(cls.refused))


def find_placeholder(module: str, name: str) -> Placeholder | None:
    """The class that stands for a name of a module; None for any other name."""
    if name not in PLACEHOLDERS.get(module, ()):
        return None
    refused = f"{module}.{name}"
    return Placeholder(name, (), {"refused": refused, "__module__": module, "__doc__": refusal(refused)})


class PlaceholderModule(Loader):
    """Makes a module of which no file is here: it has its placeholders and its submodules, nothing else."""

    def exec_module(self, module: ModuleType) -> None:
        from deepspeed._exports import lazy

        vars(module)["__getattr__"], vars(module)["__dir__"] = lazy(module.__name__, {})

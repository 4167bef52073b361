"""Which of DeepSpeed's compiled operators have a counterpart here.

Scripts ask this before they choose an optimizer: `deepspeed.ops.__compatible_ops__[CPUAdamBuilder.NAME]`. zeroshard
has its kernels ready and compiles nothing when asked, so a builder answers the question and refuses to load. The
alternative, no builders at all, would end such scripts at their import.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from deepspeed._exports import lazy
from deepspeed._refusals import MissingNameError, refusal

__getattr__, __dir__ = lazy(__name__, {})


class OpBuilder:
    """One of DeepSpeed's operators by its name.

    Attributes:
        NAME: the operator's key in `deepspeed.ops.__compatible_ops__`.
        COUNTERPART: whether zeroshard does what the operator does.
    """

    NAME: ClassVar[str] = ""
    COUNTERPART: ClassVar[bool] = False

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether zeroshard does what the operator does, on this machine."""
        return self.COUNTERPART

    def load(self, verbose: bool = True) -> Any:
        """Refuse: there is no module of compiled functions.

        Raises:
            MissingNameError: always.
        """
        raise MissingNameError(refusal(f"deepspeed.ops.op_builder.{type(self).__name__}.load"), name="load", obj=self)


class CPUAdamBuilder(OpBuilder):
    """Adam on the host: `deepspeed.ops.adam.DeepSpeedCPUAdam`."""

    NAME = "cpu_adam"
    COUNTERPART = True


class CPUAdagradBuilder(OpBuilder):
    """Adagrad on the host: `deepspeed.ops.adagrad.DeepSpeedCPUAdagrad`."""

    NAME = "cpu_adagrad"
    COUNTERPART = True


class CPULionBuilder(OpBuilder):
    """Lion on the host: `deepspeed.ops.lion.DeepSpeedCPULion`."""

    NAME = "cpu_lion"
    COUNTERPART = True


class FusedAdamBuilder(OpBuilder):
    """Adam on the device: `deepspeed.ops.adam.FusedAdam`."""

    NAME = "fused_adam"
    COUNTERPART = True


class FusedLambBuilder(OpBuilder):
    """Lamb on the device: `deepspeed.ops.lamb.FusedLamb`."""

    NAME = "fused_lamb"
    COUNTERPART = True


class FusedLionBuilder(OpBuilder):
    """Lion on the device: `deepspeed.ops.lion.FusedLion`."""

    NAME = "fused_lion"
    COUNTERPART = True


class UtilsBuilder(OpBuilder):
    """Flattening of tensors, which the engine does by itself."""

    NAME = "utils"


class AsyncIOBuilder(OpBuilder):
    """Reads and writes for offload to NVMe, by a library of zeroshard that is built when it is installed."""

    NAME = "async_io"


class GDSBuilder(OpBuilder):
    """Reads from storage into GPU memory, which is not built."""

    NAME = "gds"


class PinMemoryBuilder(OpBuilder):
    """Page-locked memory, which torch allocates."""

    NAME = "pin_memory"


class QuantizerBuilder(OpBuilder):
    """Quantization of weights and gradients for communication, which is not built."""

    NAME = "quantizer"


class FPQuantizerBuilder(OpBuilder):
    """Quantization to small floating-point formats, which is not built."""

    NAME = "fp_quantizer"


class TransformerBuilder(OpBuilder):
    """A transformer layer in one kernel, which is not built."""

    NAME = "transformer"


class InferenceBuilder(OpBuilder):
    """Kernels for serving, which are not built."""

    NAME = "transformer_inference"


class SparseAttnBuilder(OpBuilder):
    """Sparse attention, which is not built."""

    NAME = "sparse_attn"


ALL_OPS: Mapping[str, OpBuilder] = MappingProxyType({kind.NAME: kind() for kind in OpBuilder.__subclasses__()})
"""Every operator that is known by name."""

COMPATIBLE: Mapping[str, bool] = MappingProxyType({name: op.is_compatible() for name, op in ALL_OPS.items()})
"""Operator name -> whether zeroshard does what it does; this is `deepspeed.ops.__compatible_ops__`."""

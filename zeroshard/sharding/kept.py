"""Frozen tensors of quantized models that are kept byte for byte, as a plan sees them before and after `unpack`.

    weight = Int8Tensor(qdata, scale)      torchao, quanto: a tensor made of others (`__tensor_flatten__`)
        -> _weight_qdata, _weight_scale    one parameter for each of these, by the names that torchao's files have
    qweight, qzeros, scales (buffers)      GPTQ, AWQ: codes in a module without a weight, and what decodes them
        -> qweight, qzeros, scales         the same as parameters, since buffers are whole on each rank
    weight.quant_state.absmax              bitsandbytes in 4 bits, HQQ: scales that are no parameters
        -> _weight_absmax                  a parameter, which the state refers to
    weight, weight_scale_inv               fp8 layers: frozen parameters already, which no plan may cast

Small tensors, code books and index tables stay as they are, whole on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.sharding.dtensors import as_dtensor

MIN_CODES = 16_384
"""A module has codes in buffers if one of them has at least this many elements."""
MIN_SCALES = 1_024
"""Scales with fewer elements are not sharded."""
CODES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of codes. Not int64 or bool, which positions, counters and masks have."""
_SCALES = (torch.float32, torch.float16, torch.bfloat16)
_HQQ = "HQQLinear"
_HQQ_SCALES = ("scale", "zero", "scale_q", "zero_q")
"""Entries of the dict `meta` of HQQ's layers."""


class KeptAsIs(nn.Parameter):
    """A frozen parameter whose bytes are sharded, sent and saved as they are: no plan casts it."""


@dataclass(frozen=True)
class Inner:
    """A tensor that belongs to a frozen weight, and that something else than a module refers to.

    Attributes:
        name: of the parameter that it becomes, in its module.
        owner: the object, or the dict, that has it as `attribute`.
    """

    name: str
    owner: Any
    attribute: str
    tensor: torch.Tensor

    def put(self, tensor: torch.Tensor) -> Inner:
        """Let the owner refer to `tensor` in its place."""
        if isinstance(self.owner, dict):
            self.owner[self.attribute] = tensor
        else:
            setattr(self.owner, self.attribute, tensor)
        return Inner(self.name, self.owner, self.attribute, tensor)


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is made of others, and no DTensor."""
    return is_traceable_wrapper_subclass(tensor) and as_dtensor(tensor) is None


def inner_tensors(name: str, composed: torch.Tensor) -> Iterator[Inner]:
    """The tensors that the parameter `name` of a module is made of, those of tensors within it included."""
    attributes, _ = cast("Any", composed).__tensor_flatten__()
    for attribute in attributes:
        inner: torch.Tensor = getattr(composed, attribute)
        part = f"_{name}_{attribute}"
        if is_composed(inner):
            yield from inner_tensors(part[1:], inner)
        else:
            yield Inner(part, composed, attribute, inner)


def scales_of(name: str, parameter: torch.Tensor) -> Iterator[Inner]:
    """The scales of a 4-bit weight of bitsandbytes, in its `quant_state`; of double quantization both levels."""
    state: Any = vars(parameter).get("quant_state")
    nested: Any = None if state is None else vars(state).get("state2")
    for owner, part in ((state, "absmax"), (nested, "state2_absmax")):
        if owner is not None:
            yield from _scales(f"_{name}_{part}", owner, "absmax", vars(owner)["absmax"])


def scales_beside(module: nn.Module) -> list[Inner]:
    """The scales of the module's own frozen weights that are no parameters yet."""
    found: list[Inner] = []
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.requires_grad:
            found += scales_of(name, parameter)
    if type(module).__name__ == _HQQ and isinstance(vars(module).get("meta"), dict):
        meta: dict[str, Any] = vars(module)["meta"]
        for key in _HQQ_SCALES:
            found += _scales(f"_W_q_{key}", meta, key, meta.get(key))
    return [inner for inner in found if inner.name not in module._parameters]


def _scales(name: str, owner: Any, attribute: str, tensor: object) -> Iterator[Inner]:
    if isinstance(tensor, torch.Tensor) and (isinstance(tensor, KeptAsIs) or tensor.numel() >= MIN_SCALES):
        yield Inner(name, owner, attribute, tensor)


def kept_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The module's own frozen parameters in floating dtypes that are codes, or the scales and code books of codes.

    A cast to the compute dtype would destroy the codes, and round what decodes them. Codes are recognized by their
    dtype, or by the class of the layer: HQQ can keep them in a floating dtype. A bias is no such parameter.
    """
    own = {name: one for name, one in module.named_parameters(recurse=False) if not one.requires_grad}
    weights = [one for name, one in own.items() if not name.endswith("bias") and not is_composed(one)]
    floats = [one for one in weights if one.is_floating_point()]
    coded = any(one.dtype in CODES for one in own.values()) or ("W_q" in own and type(module).__name__ == _HQQ)
    return floats if coded else []


def buffers_of_codes(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's own buffers that hold the codes of a frozen weight, and those that decode them, by name.

    There is a large one of whole numbers or 8-bit floats, and scales in a floating dtype; all are saved with the model.
    The module has no parameters but a bias and other codes.
    """
    own = module.named_parameters(recurse=False)
    if isinstance(module, torch.jit.ScriptModule):
        return {}  # its compiled forward reads its own buffers
    if any(name != "bias" and not isinstance(parameter, KeptAsIs) for name, parameter in own):
        return {}
    kept = {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if not name.endswith("bias")
        and name not in module._non_persistent_buffers_set
        and not (buffer.is_meta or is_traceable_wrapper_subclass(buffer))
    }
    codes = any(buffer.dtype in CODES and buffer.numel() >= MIN_CODES for buffer in kept.values())
    if not codes or all(buffer.dtype not in _SCALES for buffer in kept.values()):
        return {}
    return {
        name: buffer
        for name, buffer in kept.items()
        if buffer.numel() >= MIN_SCALES and buffer.dtype in (*CODES, *_SCALES)
    }

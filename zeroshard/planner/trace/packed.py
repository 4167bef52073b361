"""Frozen bases in 4 bits and adapters on them, on the meta device: the sizes and allocations of bitsandbytes and peft.

    quantization_config of config.json     {"load_in_4bit": true, "bnb_4bit_use_double_quant": true, ...}
    adapter_config.json                    as peft saves it: {"peft_type": "LORA", "r": 16, "target_modules": ...}

    weight (outputs, inputs)  ->  weight                  codes, two of them in a byte
                                  _weight_absmax          a scale for each 64 values: float32, or a code of 8 bits
                                  _weight_state2_absmax   of double quantization: float32, one for each 256 of those

Each forward and each backward of such a layer decodes the whole weight into the compute dtype and multiplies by it, as
bitsandbytes does on a GPU for many tokens (for fewer than some 1,500 it may decode while it multiplies, and take less
than is planned). bitsandbytes itself is not needed; peft is, for its own modules are traced.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from zeroshard.errors import PlanError
from zeroshard.planner.files import read_json
from zeroshard.sharding.kept import MIN_SCALES, KeptAsIs

BLOCK, OUTER_BLOCK = 64, 256
"""Values that share a scale, and scales that share one of double quantization."""
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_STORAGE = {**_FLOATS, "uint8": torch.uint8}


@dataclass(frozen=True)
class FourBits:
    """What a `quantization_config` says of a base in 4 bits.

    Attributes:
        nested: double quantization, of the scales too.
        compute: dtype in which layers multiply.
        storage: dtype in which codes are kept.
        skipped: names of modules that are not quantized, beside the head.
    """

    nested: bool = False
    compute: torch.dtype = torch.float32
    storage: torch.dtype = torch.uint8
    skipped: tuple[str, ...] = ()


def read_four_bits(content: Mapping[str, Any] | None) -> FourBits | None:
    """What a `quantization_config` says; None for another method than bitsandbytes' 4 bits.

    Raises:
        PlanError: a dtype of it is not known.
    """
    if content is None or not (content.get("load_in_4bit") or content.get("_load_in_4bit")):
        return None
    return FourBits(
        nested=bool(content.get("bnb_4bit_use_double_quant")),
        compute=_dtype(content, "bnb_4bit_compute_dtype", _FLOATS) or torch.float32,
        storage=_dtype(content, "bnb_4bit_quant_storage", _STORAGE) or torch.uint8,
        skipped=tuple(content.get("llm_int8_skip_modules") or ()),
    )


def _dtype(content: Mapping[str, Any], key: str, known: Mapping[str, torch.dtype]) -> torch.dtype | None:
    given = content.get(key)
    if given is None:
        return None
    name = str(given).removeprefix("torch.")
    if name not in known:
        raise PlanError(f"quantization_config: {key} is {given!r}; it is one of {', '.join(known)}")
    return known[name]


def pack(model: nn.Module, how: FourBits) -> None:
    """Replace the linear layers of a transformers model on the meta device by layers in 4 bits, all but its head."""
    find_head: Any = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    for path, module in list(model.named_modules()):
        sizes = _sizes(module)
        if sizes is None or module is head or any(_is_named(path, name) for name in how.skipped):
            continue
        model.set_submodule(path, PackedLinear(*sizes, cast("nn.Parameter | None", module.bias), how))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a layer that bitsandbytes replaces."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":  # transformers' layer of GPT-2, with the weight transposed
        inputs, outputs = cast("nn.Parameter", module.weight).shape
        return inputs, outputs
    return None


def _is_named(path: str, name: str) -> bool:
    return f".{name}." in f".{path}."


class PackedLinear(nn.Linear):
    """A layer in 4 bits without values. A subclass of nn.Linear, for peft replaces these."""

    def __init__(self, inputs: int, outputs: int, bias: nn.Parameter | None, how: FourBits) -> None:
        super(nn.Linear, self).__init__()  # nn.Linear itself would make a whole weight
        self.in_features, self.out_features, self.how = inputs, outputs, how
        numel = inputs * outputs
        values = 2 * how.storage.itemsize  # of an element
        blocks = -(-numel // BLOCK)
        self._keep("weight", -(-numel // values), how.storage, always=True)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self._keep("_weight_absmax", blocks, torch.uint8 if how.nested else torch.float32)
        if how.nested:
            self._keep("_weight_state2_absmax", -(-blocks // OUTER_BLOCK), torch.float32)

    def _keep(self, name: str, numel: int, dtype: torch.dtype, *, always: bool = False) -> None:
        """A parameter, or what is whole on each rank, since it is small."""
        made = torch.empty((numel, 1) if always else (numel,), dtype=dtype, device="meta")
        if always or numel >= MIN_SCALES:
            self.register_parameter(name, KeptAsIs(made, requires_grad=False))
        else:
            self.register_buffer(name, made, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., outputs)."""
        product = cast("torch.Tensor", _Product.apply(input.to(self.how.compute), self))
        return product.to(input.dtype).clone()  # peft copies the result of 4-bit layers before it adds to it

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole weight, with the memory that decoding takes beside it."""
        scales = cast("torch.Tensor", self._weight_absmax)
        if self.how.nested:
            scales = scales.to(torch.float32)
            scales = scales + 0.0  # the mean is added
        codes = self.weight.detach()
        whole = codes.expand(-1, 2 * codes.element_size()).to(dtype, copy=True).flatten()
        del scales
        return whole[: self.in_features * self.out_features].view(self.out_features, self.in_features)


class _Product(torch.autograd.Function):
    """Keeps the layer alone for the backward, which decodes again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.decoded(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None
        return gradients[0] @ ctx.layer.decoded(gradients[0].dtype), None


def read_adapter(path: Path) -> Mapping[str, Any]:
    """The content of an `adapter_config.json`, or of the one in a folder. Raises PlanError for anything else."""
    file = path / "adapter_config.json" if path.is_dir() else path
    if not file.is_file():
        raise PlanError(f"--adapter {path}: no such file; give peft's adapter_config.json, or a folder with one")
    content = read_json(f"--adapter {file}", file)
    if not isinstance(content, dict) or "peft_type" not in content:
        raise PlanError(f"--adapter {file}: no 'peft_type', so this is not a config that peft saved")
    return content


def adapt(model: nn.Module, adapter: Mapping[str, Any]) -> nn.Module:
    """The model with an adapter, which alone is trained.

    Raises:
        PlanError: peft is not installed, or refuses.
    """
    try:
        peft = importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise PlanError("--adapter needs peft, whose modules are planned: pip install peft") from error
    try:
        config = peft.PeftConfig.from_peft_type(**{**adapter, "inference_mode": False})
        return peft.get_peft_model(model, config)
    except Exception as error:  # peft raises anything for a config that does not fit the model
        raise PlanError(f"--adapter: peft refuses it for this model: {type(error).__name__}: {error}") from error

"""Layers with frozen weights in the forms of libraries of quantized models, small and without these libraries.

    CodedLinear     torchao, quanto: a tensor made of others, one of them made of others again
    GroupedLinear   GPTQ, AWQ: codes, zeros and scales in buffers
    Linear4bit      bitsandbytes in 4 bits: scales in an object beside the weight
    HQQLinear       HQQ: codes in a floating dtype, zeros and scales in a dict
    Float8Linear    fine-grained fp8: codes in a floating dtype, and their scales, as parameters
    Int8Linear      bitsandbytes' LLM.int8: a second name of the codes in `layer.state`, which the products read

`QuantizedStack` has three of a kind, each with an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.support.models import WIDTH, Task, square_loss

WIDE = 136
"""Width of the layers: their codes have more than `kept.MIN_CODES` elements, and no power of two."""


class Composed(torch.Tensor):
    """Base of tensors made of others; `dequantize` gives the numbers."""

    names: tuple[str, ...] = ()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.names), None

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, torch.Tensor], *_: Any) -> torch.Tensor:
        return cls(*(inner[name] for name in cls.names))

    def dequantize(self) -> torch.Tensor:
        """The numbers."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear:
            x, weight, *rest = args
            return functional.linear(x, weight.dequantize().to(x.dtype), *rest, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            first = args[0]
            return cls(*(func(getattr(first, name), *args[1:], **(kwargs or {})) for name in cls.names))
        raise NotImplementedError(f"{cls.__name__}: {func}")


class Scales(Composed):
    """Scales in 8 bits, with one scale of their own."""

    names = ("codes", "step")

    def __new__(cls, codes: torch.Tensor, step: torch.Tensor) -> Scales:
        made: Scales = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=step.dtype, device=codes.device)
        made.codes, made.step = codes, step
        return made

    codes: torch.Tensor
    step: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """The numbers."""
        return self.codes.to(self.step.dtype) * self.step


class Coded(Composed):
    """Rows of 8-bit codes."""

    names = ("qdata", "scale")

    def __new__(cls, qdata: torch.Tensor, scale: Scales) -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.float32, device=qdata.device)
        made.qdata, made.scale = qdata, scale
        return made

    qdata: torch.Tensor
    scale: Scales

    @staticmethod
    def of(weight: torch.Tensor) -> Coded:
        """The codes of a matrix."""
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        step = scale.amax() / 255
        scales = Scales((scale / step).round().clamp(1, 255).to(torch.uint8), step.double().float())
        return Coded((weight / scales.dequantize()).round().clamp(-128, 127).to(torch.int8), scales)

    def dequantize(self) -> torch.Tensor:
        """The numbers."""
        return self.qdata.to(torch.float32) * self.scale.dequantize()


class CodedLinear(nn.Linear):
    """A linear layer whose weight is `Coded`."""

    def __init__(self) -> None:
        super().__init__(WIDE, WIDE)
        self.weight = nn.Parameter(Coded.of(self.weight.detach()), requires_grad=False)
        self.bias.requires_grad_(False)


class GroupedLinear(nn.Module):
    """A linear layer of 4-bit codes, eight in an int32, with a zero and a scale for each group of inputs."""

    def __init__(self, group: int = 17) -> None:
        super().__init__()
        weight = torch.randn(WIDE, 8 * WIDE) / (8 * WIDE) ** 0.5
        grouped = weight.unflatten(1, (-1, group))
        low, high = grouped.amin(dim=2), grouped.amax(dim=2)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15).to(torch.int32)
        codes = ((grouped / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
        self.register_buffer("qweight", _packed(codes.flatten(1).to(torch.int32)))
        self.register_buffer("zeros", zeros)
        self.register_buffer("scales", scales)
        self.register_buffer("order", torch.arange(8 * WIDE) // group)

    qweight: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    order: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(0, 32, 4, device=x.device)
        codes = ((self.qweight[..., None] >> shifts) & 15).flatten(1)
        numbers = (codes - self.zeros[:, self.order]) * self.scales[:, self.order].to(x.dtype)
        return functional.linear(x.repeat(1, 8), numbers.to(x.dtype))


def _packed(codes: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 32, 4)
    return (codes.unflatten(1, (-1, 8)).long() << shifts).sum(dim=2).to(torch.int32)


class Params4bit(nn.Parameter):
    """Two codes of 4 bits in a byte, with their scales in a state beside them."""

    quant_state: SimpleNamespace

    @staticmethod
    def of(weight: torch.Tensor, block: int = 17) -> Params4bit:
        """The codes of a matrix."""
        blocks = weight.reshape(-1, block)
        absmax = blocks.abs().amax(dim=1)
        codes = (blocks / absmax[:, None] * 7).round().add(7).to(torch.uint8).flatten()
        made = torch.Tensor._make_subclass(Params4bit, (codes[::2] << 4 | codes[1::2])[:, None], False)
        made.quant_state = SimpleNamespace(absmax=absmax, block=block, shape=weight.shape, state2=None)
        return made


Params4bit.__module__ = "bitsandbytes.nn.modules"


class Linear4bit(nn.Module):
    """A linear layer of such codes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Params4bit.of(torch.randn(WIDE, WIDE) / WIDE**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, raw = self.weight.quant_state, self.weight.data.flatten()
        codes = torch.stack((raw >> 4, raw & 15), dim=1).view(-1, state.block).float() - 7
        return functional.linear(x, (codes * state.absmax[:, None] / 7).view(state.shape).to(x.dtype))


class RepackedLinear(Linear4bit):
    """The same on a processor for whose kernel it packs its codes anew, in the first forward outside of training."""

    def __init__(self) -> None:
        super().__init__()
        self.support_avx512bf16_for_cpu = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.support_avx512bf16_for_cpu and not self.training:
            self.weight.data = self.weight.data.flip(0).view(2, -1)
        return super().forward(x)


class HQQLinear(nn.Module):
    """A linear layer of 4-bit codes in a floating dtype, with zeros and scales in a dict."""

    def __init__(self, group: int = 17) -> None:
        super().__init__()
        blocks = (torch.randn(WIDE, WIDE) / WIDE**0.5).reshape(-1, group)
        low, high = blocks.amin(dim=1, keepdim=True), blocks.amax(dim=1, keepdim=True)
        scale = (high - low) / 15
        codes = ((blocks - low) / scale).round().to(torch.uint8).flatten()
        self.W_q = nn.Parameter((codes[::2] << 4 | codes[1::2]).view(torch.float16), requires_grad=False)
        self.meta: dict[str, Any] = {"scale": scale, "zero": -low / scale, "view_as_float": True}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raw = self.W_q.view(torch.uint8)
        codes = torch.stack((raw >> 4, raw & 15), dim=1).view(self.meta["scale"].shape[0], -1).float()
        weight = (codes - self.meta["zero"]) * self.meta["scale"]
        return functional.linear(x, weight.view(WIDE, WIDE).to(x.dtype))


class Float8Linear(nn.Module):
    """A linear layer of 8-bit floats with a scale, as transformers' fine-grained fp8 has it."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDE, WIDE) / WIDE**0.5
        scale = weight.abs().amax(dim=1, keepdim=True) / 448
        self.weight = nn.Parameter((weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.dtype is torch.float8_e4m3fn
        return functional.linear(x, (self.weight.to(torch.float32) * self.weight_scale_inv).to(x.dtype))


class Int8Params(nn.Parameter):
    """Codes with a second name and their scales."""

    CB: torch.Tensor | None
    SCB: torch.Tensor | None

    @staticmethod
    def of(weight: torch.Tensor) -> Int8Params:
        """The codes of a matrix."""
        scales = weight.abs().amax(dim=1)
        codes = (weight * 127 / scales[:, None]).round().to(torch.int8)
        made = torch.Tensor._make_subclass(Int8Params, codes, False)
        made.CB, made.SCB = codes, scales
        return made


Int8Params.__module__ = "bitsandbytes.nn.modules"


class _Product(torch.autograd.Function):
    """A product that reads the codes in a state in the forward and in the backward, as bitsandbytes' does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: SimpleNamespace) -> torch.Tensor:
        ctx.state = state
        return x @ (state.CB * state.SCB[:, None] / 127).to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ (ctx.state.CB * ctx.state.SCB[:, None] / 127).to(gradients[0].dtype), None


class Int8Linear(nn.Module):
    """A linear layer of 8-bit codes, with the life of bitsandbytes' `Linear8bitLt`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Int8Params.of(torch.randn(WIDE, WIDE) / WIDE**0.5)
        self.state = SimpleNamespace(CB=None, SCB=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        out = _Product.apply(x, self.state)
        self.weight.data = self.state.CB
        assert isinstance(out, torch.Tensor)
        return out


class Adapted(nn.Module):
    """A frozen layer and a trained correction of low rank."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base = layer
        self.down = nn.Parameter(torch.randn(2, WIDE) / 12)
        self.up = nn.Parameter(torch.randn(WIDE, 2) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + x @ self.down.T @ self.up.T)


class QuantizedStack(nn.Module):
    """Three such layers between two small ones."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDE)
        self.blocks = nn.ModuleList(Adapted(kind()) for _ in range(3))
        self.head = nn.Linear(WIDE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def quantized_task(kind: Callable[[], nn.Module]) -> Task:
    """A task whose model has layers of `kind`."""

    def model(*_: Any) -> nn.Module:
        return QuantizedStack(kind)

    return Task(model, square_loss)

"""A linear layer whose three products run in fp8.

    forward       input @ weight.T          input and weight are cast
    backward      grad @ weight             grad is cast once, with its transpose; the weight's codes are transposed
                  grad.T @ input            here, so that they are not kept twice; the input's transposed codes are kept
                                            instead of the input

The weight's codes are those that the engine keeps, if the weight rests in fp8 (see `parameter`); else it is cast here.
The gradients can't be differentiated again, so models that need second derivatives keep such layers out of fp8.
Rejected: a tensor subclass around the codes, which all operations of a forward and torch.compile would have to handle.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zeroshard.fp8.cast import GRADIENTS, VALUES, cast, cast_both, cast_columns, cast_rows, transpose
from zeroshard.fp8.parameter import CodedGuard, Codes, kept_codes
from zeroshard.fp8.products import product
from zeroshard.fp8.recipe import Scaling


@dataclass
class LastInput:
    """Caches the cast of the last input, for layers that get the same input in turn (such as query, key and value)."""

    _of: weakref.ref[torch.Tensor] | None = None
    _version: int = -1
    _cast: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] | None = field(default=None, repr=False)

    def cast(self, values: torch.Tensor, *, both: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Codes of the input as a matrix, transposed codes (None unless `both`), and the unscale; see `cast`."""
        flat = values.reshape(-1, values.shape[-1])
        if values.is_inference():  # it has no version that would tell whether it has changed
            return _input_codes(flat, both=both)
        found = self._cast
        same = self._of is not None and self._of() is values and self._version == values._version
        if same and found is not None and (found[1] is not None or not both):
            return found
        made = _input_codes(flat, both=both)
        self._of, self._version, self._cast = weakref.ref(values), values._version, made
        return made


def _input_codes(flat: torch.Tensor, *, both: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    if both:
        return cast_both(flat, VALUES)
    codes, unscale = cast(flat, VALUES)
    return codes, None, unscale


class Fp8Linear(nn.Linear):
    """A linear layer that computes in fp8; `convert` makes it of a plain one, with the same parameters."""

    before: type[nn.Linear]
    """The class of the plain layer."""

    scaling: Scaling
    last_input: LastInput
    kept: Codes | None
    """The weight's codes that the engine keeps, if it does; torch.compile can't read them from the parameter."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The output (..., out_features) of an input (..., in_features), in the dtype of the weight or of autocast."""
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input, weight = input.to(dtype), weight if isinstance(weight, CodedGuard) else weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if input.dtype != weight.dtype or input.dtype not in (torch.bfloat16, torch.float16) or not input.numel():
            return functional.linear(input, weight, bias)
        if self.scaling is Scaling.ROWWISE:
            result = _rowwise(input, weight)
        else:
            codes, unscale = self._codes_of(weight)
            result = _tensorwise(input, weight, codes, unscale, self.last_input)
        return result if bias is None else result + bias

    def _codes_of(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self.kept
        if kept is None or not isinstance(weight, CodedGuard):  # the parameter has its values
            return cast(weight.detach(), VALUES)
        return kept.codes, kept.unscale

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.scaling.value}"


def adopt_codes(model: nn.Module) -> None:
    """Give the layers of a model the codes that the engine keeps of their weights, or None."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.kept = kept_codes(module.weight)


def _tensorwise(
    input: torch.Tensor, weight: torch.Tensor, codes: torch.Tensor, unscale: torch.Tensor, last: LastInput
) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return _tensor(_Traced.apply(input, weight, codes, unscale))
    keeps = weight.requires_grad and torch.is_grad_enabled()
    return _tensor(_Tensorwise.apply(input, weight, codes, unscale, last, keeps))


def _rowwise(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _tensor(_Rowwise.apply(input, weight))


def _tensor(result: Any) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result


class _Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        codes: torch.Tensor,
        unscale: torch.Tensor,
        last: LastInput,
        keeps: bool,
    ) -> torch.Tensor:
        of_input, turned, input_unscale = last.cast(input, both=keeps)
        # Not saved as tensors, since checkpoints and offload of activations would copy the weight.
        ctx.weight = codes, unscale
        ctx.shape, ctx.dtype = input.shape, input.dtype
        ctx.save_for_backward(*(() if turned is None else (turned, input_unscale)))
        return _forward(of_input, input_unscale, codes, unscale, input)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (
            *_backward(gradients[0], ctx.weight, ctx.saved_tensors, ctx.needs_input_grad, ctx.shape, ctx.dtype),
            *(None,) * 4,
        )


class _Traced(torch.autograd.Function):
    """The same for torch.compile, which needs all tensors of the backward to be saved, and shares casts itself."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, codes: torch.Tensor, unscale: torch.Tensor
    ) -> torch.Tensor:
        of_input, turned, input_unscale = cast_both(input.reshape(-1, input.shape[-1]), VALUES)
        ctx.shape, ctx.dtype = input.shape, input.dtype
        ctx.save_for_backward(codes, unscale, turned, input_unscale)
        return _forward(of_input, input_unscale, codes, unscale, input)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes, unscale, turned, input_unscale = ctx.saved_tensors
        kept = turned, input_unscale
        grads = _backward(gradients[0], (codes, unscale), kept, ctx.needs_input_grad, ctx.shape, ctx.dtype)
        return *grads, None, None


def _forward(
    of_input: torch.Tensor, input_unscale: torch.Tensor, codes: torch.Tensor, unscale: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    result = product(of_input, input_unscale, codes, unscale, like.dtype, fast=True)
    return result.view(*like.shape[:-1], codes.shape[0])


def _backward(
    grad: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor],
    kept: Sequence[torch.Tensor],
    needed: Sequence[bool],
    shape: torch.Size,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the input and of the weight.

    Args:
        grad: gradient of the output, of shape (..., out_features).
        weight: its codes and unscale.
        kept: the input's transposed codes and unscale, if the weight needs a gradient.
        needed: whether input and weight need gradients.
        shape, dtype: of the input.
    """
    flat = grad.reshape(-1, grad.shape[-1])
    input_grad = weight_grad = None
    if not needed[1]:
        of_grad, grad_unscale = cast(flat, GRADIENTS)
    else:
        of_grad, grad_turned, grad_unscale = cast_both(flat, GRADIENTS)
        weight_grad = product(grad_turned, grad_unscale, kept[0], kept[1], dtype)
    if needed[0]:
        codes, unscale = weight
        input_grad = product(of_grad, grad_unscale, transpose(codes), unscale, dtype).view(shape)
    return input_grad, weight_grad


class _Rowwise(torch.autograd.Function):
    """Products with a scale per row. Each operand is cast twice, since its two products sum over different dims."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        flat = input.reshape(-1, input.shape[-1])
        ctx.save_for_backward(input, weight)
        result = product(*cast_rows(flat, VALUES), *cast_rows(weight, VALUES), input.dtype, fast=True)
        return result.view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        flat = gradients[0].reshape(-1, weight.shape[0])
        input_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            turned = cast_columns(weight, VALUES)
            input_grad = product(*cast_rows(flat, VALUES), *turned, input.dtype).view(input.shape)
        if ctx.needs_input_grad[1]:
            of_input = cast_columns(input.reshape(-1, input.shape[-1]), VALUES)
            weight_grad = product(*cast_columns(flat, VALUES), *of_input, input.dtype)
        return input_grad, weight_grad

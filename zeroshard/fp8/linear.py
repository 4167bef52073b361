"""A linear layer whose three products run in fp8.

    forward       input @ weight.T          input and weight are cast
    backward      grad @ weight             grad is cast once, with its transpose; the weight's codes are transposed
                  grad.T @ input            here, so that they are not kept twice; the input's transposed codes are kept
                                            instead of the input

The weight's codes are those that the engine keeps, if the weight rests in fp8 (see `parameter`); else it is cast here.
The gradients can't be differentiated again, which is an error, not a wrong number: models that need second derivatives
keep such layers out of fp8.
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

from zeroshard.errors import UsageError
from zeroshard.fp8.arithmetic import (
    cast_operand,
    cast_operands,
    cast_weight,
    format_of_gradients,
    multiply,
    turn_weight,
)
from zeroshard.fp8.block_casts import Operand
from zeroshard.fp8.cast import VALUES, cast_columns, cast_rows
from zeroshard.fp8.meta_casts import resting_codes
from zeroshard.fp8.parameter import CodedGuard, Codes, kept_codes
from zeroshard.fp8.products import product
from zeroshard.fp8.recipe import Scaling

_Cast = tuple[Operand, Operand | None]
"""An input, and the transposed one if it is wanted."""


@dataclass
class LastInput:
    """Caches the cast of the last input, for layers that get the same input in turn (such as query, key and value).

    A layer that gets the same tensor again may get other values: collectives and other libraries write into a tensor
    without a new version. So a cast serves each layer once.
    """

    by_block: bool
    _of: weakref.ref[torch.Tensor] | None = None
    _version: int = -1
    _cast: _Cast | None = field(default=None, repr=False)
    _served: set[int] = field(default_factory=set)

    def cast(self, values: torch.Tensor, layer: int, *, both: bool) -> _Cast:
        """The input as a matrix, and the transposed matrix (None unless `both`); `layer` tells layers apart."""
        flat = values.reshape(-1, values.shape[-1])
        if values.is_inference():  # it has no version that would tell whether it has changed
            return self._made(flat, both=both)
        found = self._cast
        same = self._of is not None and self._of() is values and self._version == values._version
        if same and layer not in self._served and found is not None and (found[1] is not None or not both):
            self._served.add(layer)
            return found
        made = self._made(flat, both=both)
        self._of, self._version, self._cast, self._served = weakref.ref(values), values._version, made, {layer}
        return made

    def _made(self, flat: torch.Tensor, *, both: bool) -> _Cast:
        if both:
            return cast_operands(flat, VALUES, by_block=self.by_block)
        return cast_operand(flat, VALUES, by_block=self.by_block), None


class Fp8Linear(nn.Linear):
    """A linear layer that computes in fp8; `convert` makes it of a plain one, with the same parameters."""

    before: type[nn.Linear]
    """The class of the plain layer."""

    scaling: Scaling
    last_input: LastInput
    rests: bool
    """Whether the plan lets the weight rest in fp8, if it can; for the planner, which has no engine."""
    kept: Codes | None
    """The weight's codes that the engine keeps, if it does; torch.compile can't read them from the parameter."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The output (..., out_features) of an input (..., in_features), in the dtype of the weight or of autocast."""
        weight, bias = self.weight, self.bias
        if not input.is_meta and torch.is_autocast_enabled(input.device.type):  # the planner runs it on meta
            dtype = torch.get_autocast_dtype(input.device.type)
            input, weight = input.to(dtype), weight if isinstance(weight, CodedGuard) else weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if input.dtype != weight.dtype or input.dtype not in (torch.bfloat16, torch.float16) or not input.numel():
            return functional.linear(input, weight, bias)
        if self.scaling is Scaling.ROWWISE:
            result = _rowwise(input, weight)
        else:
            result = _kept(self, input, weight, self._codes_of(weight))
        return result if bias is None else result + bias

    def _codes_of(self, weight: torch.Tensor) -> Operand:
        kept = self.kept
        if weight.is_meta and self.rests:
            return resting_codes(weight, VALUES, self.scaling.block)
        if kept is None or not isinstance(weight, CodedGuard):  # the parameter has its values
            return cast_weight(weight.detach(), by_block=self.last_input.by_block)
        return kept.codes, kept.unscale

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.scaling.value}"


def adopt_codes(model: nn.Module) -> None:
    """Give the layers of a model the codes that the engine keeps of their weights, or None."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            weight = own_weight(module)
            module.kept = None if weight is None else kept_codes(weight)


def own_weight(linear: nn.Linear) -> nn.Parameter | None:
    """A layer's weight; None if a parametrization, or a hook, computes it of other parameters in each forward."""
    return dict(linear.named_parameters(recurse=False)).get("weight")


def _kept(layer: Fp8Linear, input: torch.Tensor, weight: torch.Tensor, coded: Operand) -> torch.Tensor:
    """The product with a weight whose codes serve forward and backward."""
    last = layer.last_input
    if torch.compiler.is_compiling():
        return _tensor(_Traced.apply(input, weight, *coded, last.by_block))
    keeps = weight.requires_grad and torch.is_grad_enabled()
    return _tensor(_Eager.apply(input, weight, coded, last, id(layer), keeps))


def _rowwise(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _tensor(_Rowwise.apply(input, weight))


def _tensor(result: Any) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, coded: Operand, last: LastInput, layer: int, keeps: bool
    ) -> torch.Tensor:
        of_input, turned = last.cast(input, layer, both=keeps)
        # Not saved as tensors, since checkpoints and offload of activations would copy the weight.
        ctx.weight = coded
        ctx.shape, ctx.dtype, ctx.by_block = input.shape, input.dtype, last.by_block
        ctx.save_for_backward(*(turned or ()))
        return _forward(of_input, coded, input, by_block=last.by_block)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            found = _backward(ctx, gradients[0], ctx.weight, ctx.saved_tensors)
        return *_final(found, gradients[0]), None, None, None, None


class _Traced(torch.autograd.Function):
    """The same for torch.compile, which needs all tensors of the backward to be saved, and shares casts itself."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        codes: torch.Tensor,
        unscale: torch.Tensor,
        by_block: bool,
    ) -> torch.Tensor:
        of_input, turned = cast_operands(input.reshape(-1, input.shape[-1]), VALUES, by_block=by_block)
        ctx.shape, ctx.dtype, ctx.by_block = input.shape, input.dtype, by_block
        ctx.save_for_backward(codes, unscale, *turned)
        return _forward(of_input, (codes, unscale), input, by_block=by_block)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes, unscale, *turned = ctx.saved_tensors
        return *_backward(ctx, gradients[0], (codes, unscale), turned), None, None, None


def _forward(of_input: Operand, coded: Operand, like: torch.Tensor, *, by_block: bool) -> torch.Tensor:
    result = multiply(of_input, coded, like.dtype, by_block=by_block, fast=True)
    return result.view(*like.shape[:-1], coded[0].shape[0])


def _backward(
    ctx: Any, grad: torch.Tensor, coded: Operand, turned: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the input and of the weight.

    Args:
        ctx: with the input's shape and dtype, and whether scales are by block.
        grad: gradient of the output, of shape (..., out_features).
        coded: the weight.
        turned: the transposed input, if the weight needs a gradient.
    """
    by_block: bool = ctx.by_block
    flat, kind = grad.reshape(-1, grad.shape[-1]), format_of_gradients(by_block=by_block)
    input_grad = weight_grad = None
    if not ctx.needs_input_grad[1]:
        of_grad = cast_operand(flat, kind, by_block=by_block)
    else:
        of_grad, grad_turned = cast_operands(flat, kind, by_block=by_block)
        weight_grad = multiply(grad_turned, (turned[0], turned[1]), ctx.dtype, by_block=by_block)
    if ctx.needs_input_grad[0]:
        of_weight = turn_weight(coded, by_block=by_block)
        input_grad = multiply(of_grad, of_weight, ctx.dtype, by_block=by_block).view(ctx.shape)
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
        with torch.no_grad():
            found = _Rowwise._gradients(ctx, gradients[0])
        return _final(found, gradients[0])

    @staticmethod
    def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        input, weight = ctx.saved_tensors
        flat = grad.reshape(-1, weight.shape[0])
        input_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            turned = cast_columns(weight, VALUES)
            input_grad = product(*cast_rows(flat, VALUES), *turned, input.dtype).view(input.shape)
        if ctx.needs_input_grad[1]:
            of_input = cast_columns(input.reshape(-1, input.shape[-1]), VALUES)
            weight_grad = product(*cast_columns(flat, VALUES), *of_input, input.dtype)
        return input_grad, weight_grad


def _final(
    found: tuple[torch.Tensor | None, torch.Tensor | None], grad: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the input and the weight, which raise an error where they are differentiated again.

    Only a backward with `create_graph=True` runs with gradients enabled. Codes have no derivatives, so without the
    error a second backward would leave terms out.
    """
    if not torch.is_grad_enabled():
        return found
    leaf = grad.new_zeros((), requires_grad=True)  # so that the error is met though `grad` itself may need no gradient
    of_input, of_weight = (None if one is None else _tensor(_Final.apply(one, grad, leaf)) for one in found)
    return of_input, of_weight


class _Final(torch.autograd.Function):
    """Passes a gradient on; its own backward is refused."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise UsageError(
            f"backward: second derivatives through a layer that multiplies in fp8 (its gradient has the shape "
            f"{tuple(gradients[0].shape)}) are not supported; leave the layers that they pass through out of "
            "fp8.filter, or out of Fp8(names=...)"
        )

"""Casts matrices to fp8 with power-of-two scales per tensor or per row, as they are or transposed.

    scale     the largest power of two with which no value exceeds the format's largest (448 or 57344)
    code      value * scale, rounded to the nearest number of the format, ties to even
    unscale   1 / scale, float32; a product multiplies its result by it

An inf or NaN makes the scale of its tensor or row the smallest one, and becomes a NaN, so that it shows in results. On
a GPU, kernels read each tensor twice and write it once, or twice with its transpose; torch.compile launches them as its
own. All implementations give the same bits.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from zeroshard.fp8 import meta_casts

VALUES = torch.float8_e4m3fn
"""The format of weights and activations."""
GRADIENTS = torch.float8_e5m2
"""The format of gradients of activations, which span more orders of magnitude."""
FORMATS = (VALUES, GRADIENTS)
COLUMNS = 16
"""Products need sizes that are multiples of it; transposed casts are padded with zeros to such a multiple."""

_EXPONENT = {VALUES: 8, GRADIENTS: 15}
_MANTISSA_OF_LARGEST = 0x600000
"""The mantissa bits of 1.75, in float32."""
_MANTISSA = 0x7FFFFF
_INFINITE = 0x7F800000
_BIAS = 127
_MAGNITUDE = 0x7FFFFFFF
_LARGEST_SHIFT = 126

# Imported here, since torch.compile can trace neither an import nor a function with a cache.
_KERNELS: ModuleType | None = import_module("zeroshard.fp8.cast_kernels") if find_spec("triton") is not None else None


def scale_and_unscale(largest: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and unscales for tensors with the given largest magnitudes (float32, any shape)."""
    bits = (largest.view(torch.int32) & _MAGNITUDE).clamp(max=_INFINITE)  # the bits of a NaN differ between machines
    shift = _EXPONENT[kind] + _BIAS - (bits >> 23) - ((bits & _MANTISSA) > _MANTISSA_OF_LARGEST).int()
    shift = shift.clamp(-_LARGEST_SHIFT, _LARGEST_SHIFT)
    return ((shift + _BIAS) << 23).view(torch.float32), ((_BIAS - shift) << 23).view(torch.float32)


def cast(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a matrix (rows, columns), and its unscale (1,)."""
    if values.is_meta:
        return meta_casts.cast(values, kind)
    if _KERNELS is not None and _by_kernel(values):
        return _KERNELS.cast(values, kind)
    return _cast(values, kind)


def cast_both(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (rows, columns), transposed codes (columns, padded rows) and the unscale of both (1,)."""
    if values.is_meta:
        return meta_casts.cast_both(values, kind)
    if _KERNELS is not None and _by_kernel(values):
        return _KERNELS.cast_both(values, kind)
    codes, unscale = _cast(values, kind)
    return codes, transpose(codes), unscale


def cast_rows(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a matrix (rows, columns), and the unscales of its rows (rows, 1)."""
    if values.is_meta:
        return meta_casts.cast_rows(values, kind)
    if _KERNELS is not None and _by_kernel(values):
        return _KERNELS.cast_rows(values, kind)
    wide = values.float()
    scale, unscale = scale_and_unscale(wide.abs().amax(dim=1, keepdim=True), kind)
    return to_codes(wide, scale, kind), unscale


def cast_columns(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cast_rows` of the transposed matrix, with rows padded with zeros to a multiple of COLUMNS."""
    if values.is_meta:
        return meta_casts.cast_columns(values, kind)
    if _KERNELS is not None and _by_kernel(values):
        return _KERNELS.cast_columns(values, kind)
    wide = values.float()
    scale, unscale = scale_and_unscale(wide.abs().amax(dim=0), kind)
    return transpose(to_codes(wide, scale, kind)), unscale[:, None]


def transpose(codes: torch.Tensor) -> torch.Tensor:
    """Transposed codes (columns, padded rows), each row padded with zeros to a multiple of COLUMNS."""
    if codes.is_meta:
        return meta_casts.transpose(codes)
    if _KERNELS is not None and _by_kernel(codes):
        return _KERNELS.transpose(codes)
    missing = -codes.shape[0] % COLUMNS
    turned = codes.view(torch.uint8).t()
    if missing:
        turned = torch.nn.functional.pad(turned, (0, missing))
    return turned.contiguous().view(codes.dtype)


def to_codes(values: torch.Tensor, scale: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Values (float32) times a scale, rounded to the format."""
    scaled = values * scale
    # e5m2 has an inf, and a processor rounds an inf to e4m3's NaN; with NaN for both, all machines give the same bits.
    return torch.where(scaled.isinf(), torch.nan, scaled).to(kind)


def decode(codes: torch.Tensor, unscale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of codes, in `dtype`; see `spread` for their unscales."""
    return (codes.float() * spread(unscale, codes.shape)).to(dtype)


def spread(unscale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Unscales that apply to a matrix of this shape, element by element.

    Args:
        unscale: of shape (1,), or a matrix with one for each block of equal size.
    """
    if unscale.dim() < 2:
        return unscale
    rows, columns = unscale.shape
    return unscale.repeat_interleave(shape[0] // rows, 0).repeat_interleave(shape[1] // columns, 1)


def _cast(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    largest = values.abs().amax().float() if values.numel() else values.new_zeros((), dtype=torch.float32)
    scale, unscale = scale_and_unscale(largest, kind)
    return to_codes(values.float(), scale, kind), unscale.view(1)


def _by_kernel(values: torch.Tensor) -> bool:
    return values.is_cuda and values.numel() > 0


def has_kernels() -> bool:
    """Whether Triton is installed, whose kernels cast tensors on a GPU."""
    return _KERNELS is not None

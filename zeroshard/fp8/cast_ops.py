"""The launched casts as operations of torch, for graphs of torch.compile; the same names and results as `cast_kernels`.

Its own code for them passes over memory more often, and once with a stride of a whole row for a transpose. Rejected: to
let it see into the kernels, which it would then compile anew for each graph.
"""

from __future__ import annotations

import torch

from zeroshard.fp8 import cast_kernels


@torch.library.custom_op("zeroshard::fp8_cast", mutates_args=())
def cast(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See cast.cast."""
    return cast_kernels.cast(values, kind)


@cast.register_fake
def _(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(values.shape, dtype=kind, device=values.device), _unscale(values)


@torch.library.custom_op("zeroshard::fp8_cast_transposed", mutates_args=())
def cast_transposed(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See cast.cast_transposed."""
    return cast_kernels.cast_transposed(values, kind)


@cast_transposed.register_fake
def _(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return _turned(values, kind), _unscale(values)


@torch.library.custom_op("zeroshard::fp8_cast_both", mutates_args=())
def cast_both(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See cast.cast_both."""
    return cast_kernels.cast_both(values, kind)


@cast_both.register_fake
def _(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    straight = torch.empty(values.shape, dtype=kind, device=values.device)
    return straight, _turned(values, kind), _unscale(values)


@torch.library.custom_op("zeroshard::fp8_cast_rows", mutates_args=())
def cast_rows(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See cast.cast_rows."""
    return cast_kernels.cast_rows(values, kind)


@cast_rows.register_fake
def _(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(values.shape, dtype=kind, device=values.device)
    return codes, torch.empty((values.shape[0], 1), dtype=torch.float32, device=values.device)


@torch.library.custom_op("zeroshard::fp8_transpose", mutates_args=())
def transpose(codes: torch.Tensor) -> torch.Tensor:
    """See cast.transpose."""
    return cast_kernels.transpose(codes)


@transpose.register_fake
def _(codes: torch.Tensor) -> torch.Tensor:
    return _turned(codes, codes.dtype)


def _turned(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    rows, columns = values.shape
    return torch.empty((columns, cast_kernels.padded_rows(rows)), dtype=kind, device=values.device)


def _unscale(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, dtype=torch.float32, device=values.device)

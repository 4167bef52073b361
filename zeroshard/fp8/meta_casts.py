"""The casts on the meta device, where the planner counts bytes: operations that read and write what the kernels do.

    largest    a pass that reads the values            cast    a pass that reads them and writes codes

Scales by tile need no pass of their own. Only shapes and dtypes of the results mean something. Rejected: the operations
of a processor, which make float32 copies that no kernel makes, so that fp8 seemed slower than bf16.
"""

from __future__ import annotations

import torch

from zeroshard.fp8.recipe import BLOCK


def cast(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See cast.cast."""
    return values.to(kind), _largest(values).view(1)


def cast_rows(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See cast.cast_rows."""
    return values.to(kind), _float(values.amax(dim=1, keepdim=True))


def cast_columns(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See cast.cast_columns."""
    return _turned(values, kind, 16), _float(values.amax(dim=0))[:, None]


def cast_both(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See cast.cast_both; the second cast stands for what the first one writes besides."""
    codes, unscale = cast(values, kind)
    return codes, _turned(codes, kind, 16), unscale


def cast_tiles(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See block_casts.cast_tiles."""
    rows, columns = values.shape
    return values.to(kind), values.new_empty((columns // BLOCK, rows), dtype=torch.float32).t()


def cast_tiles_both(
    values: torch.Tensor, kind: torch.dtype
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """See block_casts.cast_tiles_both."""
    straight = cast_tiles(values, kind)
    turned = _turned(straight[0], kind, BLOCK)
    return straight, (turned, values.new_empty((turned.shape[1] // BLOCK, turned.shape[0]), dtype=torch.float32).t())


def cast_blocks(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See block_casts.cast_blocks."""
    rows, columns = values.shape
    return values.to(kind), values.new_empty((rows // BLOCK, columns // BLOCK), dtype=torch.float32)


def resting_codes(weight: torch.Tensor, kind: torch.dtype, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and unscales of a weight that rests in fp8: they take no pass, and no memory beside the parameter's.

    Args:
        block: side of the blocks that share a scale; 0 if all of the weight does.
    """
    rows, columns = weight.shape
    codes = weight.detach().view(kind)[:, :columns]
    return codes, weight.new_empty((rows // block, columns // block) if block else 1, dtype=torch.float32)


def transpose(codes: torch.Tensor) -> torch.Tensor:
    """See cast.transpose."""
    return _turned(codes, codes.dtype, 16)


def _turned(values: torch.Tensor, kind: torch.dtype, multiple: int) -> torch.Tensor:
    """The transposed values as codes, with rows padded to a multiple, in one pass."""
    rows, columns = values.shape
    turned = values.new_empty((columns, -(-rows // multiple) * multiple), dtype=kind)
    turned[:, :rows].copy_(values.t())
    return turned


def _largest(values: torch.Tensor) -> torch.Tensor:
    return _float(values.amax())


def _float(values: torch.Tensor) -> torch.Tensor:
    return values.new_empty(values.shape, dtype=torch.float32)

"""Multiplies two matrices of fp8 codes: on a GPU by its fp8 units, on a processor in float32.

    product(a, b) = (a * unscale of a) @ (b * unscale of b).T          a: (M, K), b: (N, K), both row-major

Both sum the products of codes, and apply the scales to the sum; float32 sums on a processor are rounded differently.
With scales by block, the scales of each 128 values of K are applied to their sum, by cuBLAS. On the meta device it is
one product, which the planner counts. Rejected: torch's fp8 product for processors, which supports some formats and
sizes only; kernels of Triton for scales by block, which cuBLAS has since CUDA 12.9.
"""

from __future__ import annotations

import torch

from zeroshard.errors import PlanError
from zeroshard.fp8.cast import COLUMNS, decode
from zeroshard.fp8.recipe import BLOCK, Scaling

_HOPPER = 9
_LEAST_CUDA = [12, 9]
"""Where products with scales by block run: GPUs of this generation, with cuBLAS of this release of CUDA."""
_LEAST_CAPABILITY = (8, 9)


def check_device(device: torch.device, scaling: Scaling) -> None:
    """Raises PlanError for a GPU without fp8 units, or without products with such scales."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < _LEAST_CAPABILITY:
        raise PlanError(
            f"fp8: {torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}, and products in "
            "fp8 need 8.9 or above; leave fp8 out"
        )
    if scaling is Scaling.BLOCKWISE:
        _check_blocks(torch.cuda.get_device_name(device), found, torch.version.cuda)


def _check_blocks(name: str, capability: tuple[int, int], cuda: str | None) -> None:
    """Raises PlanError unless cuBLAS multiplies with scales by block on a GPU of this name."""
    release = [int(part) for part in (cuda or "0").split(".")[:2]]
    if capability[0] != _HOPPER or release < _LEAST_CUDA:
        raise PlanError(
            "fp8: recipe 'blockwise' needs a GPU of compute capability 9.0 (H100, H200) and torch built with CUDA 12.9 "
            f"or above; here are {name}, {capability[0]}.{capability[1]}, and CUDA {cuda or 'none'}: use 'tensorwise'"
        )


def product(
    a: torch.Tensor,
    unscale_a: torch.Tensor,
    b: torch.Tensor,
    unscale_b: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> torch.Tensor:
    """The product (M, N), in `dtype`, of codes `a` (M, K) and `b` (N, K).

    Args:
        unscale_a, unscale_b: of shape (1,), for whole matrices, or (rows, 1), for rows.
        fast: let the GPU keep partial sums in fewer bits, which its full rate needs.
    """
    by_row = unscale_a.numel() > 1 or unscale_b.numel() > 1
    if a.is_meta:
        return _on_meta(a, b, dtype)
    if not a.is_cuda:
        return (a.float() @ b.float().t() * unscale_a * (unscale_b.view(1, -1) if by_row else unscale_b)).to(dtype)
    # functional.scaled_mm would break graphs of torch.compile in torch 2.11.
    right = unscale_b.view(1, -1) if by_row else unscale_b
    return torch._scaled_mm(a, b.t(), unscale_a, right, out_dtype=dtype, use_fast_accum=fast)


def product_of_blocks(
    a: torch.Tensor, unscale_a: torch.Tensor, b: torch.Tensor, unscale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The product (M, N), in `dtype`, of codes `a` (M, K) and `b` (N, K), with K and N multiples of 128.

    Args:
        unscale_a: of tiles, (M, K / 128), column by column.
        unscale_b: of tiles, (N, K / 128), column by column; or of blocks, (N / 128, K / 128), row by row.
    """
    if a.is_meta:
        return _on_meta(a, b, dtype)
    if torch.compiler.is_compiling():
        found: torch.Tensor = _opaque_product_of_blocks(a, unscale_a, b, unscale_b, dtype)
        return found
    return _product_of_blocks(a, unscale_a, b, unscale_b, dtype)


def _product_of_blocks(
    a: torch.Tensor, unscale_a: torch.Tensor, b: torch.Tensor, unscale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    if not a.is_cuda:
        wide = decode(a, unscale_a, torch.float32), decode(b, unscale_b, torch.float32)
        return (wide[0] @ wide[1].t()).to(dtype)
    rows, missing = a.shape[0], -a.shape[0] % COLUMNS
    if missing:  # cuBLAS reads the scales of 4 rows at once
        a = torch.nn.functional.pad(a.view(torch.uint8), (0, 0, 0, missing)).view(a.dtype)
        unscale_a = torch.nn.functional.pad(unscale_a.t(), (0, missing)).t()
    by_block, blocks = unscale_b.shape[0] < b.shape[0], unscale_b.shape[1]
    if by_block and blocks % 4:  # cuBLAS expects rows of scales that begin at multiples of 16 bytes; tiles need none
        unscale_b = unscale_b.t().repeat_interleave(BLOCK, 1).t()
    result = torch._scaled_mm(a, b.t(), unscale_a, unscale_b.t(), out_dtype=dtype)
    return result[:rows] if missing else result


@torch.library.custom_op("zeroshard::product_of_blocks", mutates_args=())
def _opaque_product_of_blocks(
    a: torch.Tensor, unscale_a: torch.Tensor, b: torch.Tensor, unscale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """An operation that Inductor calls as it is: its own lowering refuses such scales in graphs of any length."""
    return _product_of_blocks(a, unscale_a, b, unscale_b, dtype)


@_opaque_product_of_blocks.register_fake
def _shape_of_product(
    a: torch.Tensor, unscale_a: torch.Tensor, b: torch.Tensor, unscale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _on_meta(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One product, with a scale that is not read."""
    one = a.new_empty(1, dtype=torch.float32)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=dtype)

"""Multiplies two matrices of fp8 codes: on a GPU by its fp8 units, on a processor in float32.

    product(a, b) = (a * unscale of a) @ (b * unscale of b).T          a: (M, K), b: (N, K), both row-major

Both sum the products of codes, and apply the scales to the sum; float32 sums on a processor are rounded differently. On
the meta device it is one product, which the planner counts. Rejected: torch's fp8 product for processors, which
supports some formats and sizes only.
"""

from __future__ import annotations

import torch

from zeroshard.errors import PlanError

_LEAST_CAPABILITY = (8, 9)


def check_device(device: torch.device) -> None:
    """Raises PlanError for a GPU without fp8 units."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < _LEAST_CAPABILITY:
        raise PlanError(
            f"fp8: {torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}, and products in "
            "fp8 need 8.9 or above; leave fp8 out"
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
        return torch.mm(a, b.t()).to(dtype)
    if not a.is_cuda:
        return (a.float() @ b.float().t() * unscale_a * (unscale_b.view(1, -1) if by_row else unscale_b)).to(dtype)
    # functional.scaled_mm would break graphs of torch.compile in torch 2.11.
    right = unscale_b.view(1, -1) if by_row else unscale_b
    return torch._scaled_mm(a, b.t(), unscale_a, right, out_dtype=dtype, use_fast_accum=fast)

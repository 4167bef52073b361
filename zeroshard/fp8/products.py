"""Products of two matrices in fp8: by the GPU's units, or in float32 on the values that the codes stand for.

    product(a, b) = (a * unscale of a) @ (b * unscale of b).T          a: (M, K), b: (N, K), both row by row

A GPU sums the products of codes and applies the scales to the sum; so does the processor, where float32 sums have
other roundings. On the meta device it is what the planner counts. Rejected: torch's own product for processors, which
is there for some formats and sizes only.
"""

from __future__ import annotations

import torch

from zeroshard.errors import PlanError

_LEAST_CAPABILITY = (8, 9)


def check_device(device: torch.device) -> None:
    """Raises PlanError for a GPU without units for fp8."""
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
    """The product of codes as a matrix of `dtype`.

    Args:
        unscale_a, unscale_b: of shape (1,) for the whole matrix each, or (rows, 1) for each row of both.
        fast: the GPU may keep partial sums in fewer bits, as it does at its full rate.
    """
    by_row = unscale_a.numel() > 1 or unscale_b.numel() > 1
    if a.is_meta:
        return torch.mm(a, b.t()).to(dtype)
    if not a.is_cuda:
        return (a.float() @ b.float().t() * unscale_a * (unscale_b.view(1, -1) if by_row else unscale_b)).to(dtype)
    # Not functional.scaled_mm, in which torch.compile of torch 2.11 breaks its graph.
    right = unscale_b.view(1, -1) if by_row else unscale_b
    return torch._scaled_mm(a, b.t(), unscale_a, right, out_dtype=dtype, use_fast_accum=fast)

"""Orthonormal columns without a decision by the host, and the columns that a right factor starts from.

    three times  P <- P / |columns|,  P'P + shift = L L',  P <- P inv(L')

One Cholesky-QR loses the square of the condition number of P in digits. With a shift it can't fail, and gives columns
that a second pass makes orthonormal; the third one is for matrices that are singular in float64 (Fukaya et al. 2020,
arXiv:1809.11085). Columns are scaled first, so that only their directions matter. Rejected: Householder's QR, which is
as exact, but on a GPU works column by column.
"""

from __future__ import annotations

import torch

LEAST = 1e-5
"""A direction is left out if the matrix is so much smaller along it than along another: float32 rounds it away."""
_PASSES = 3
_EPSILON = 2.0**-52
_TINY = 1e-150
"""Divides no column but one of zeros; its square is above 0."""
_WORD = (1 << 32) - 1


def orthonormalize(matrices: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span the same as those of the matrices, each column the same as with those before it.

    Columns of zeros stay zeros. Columns that depend on others become any that are orthogonal to these. A matrix with
    inf or NaN becomes zeros.

    Args:
        matrices: (batch, rows, columns), float64, with at least as many rows as columns.
    """
    rows, columns = matrices.shape[-2:]
    shift = 16 * _EPSILON * (rows + columns)
    found = matrices
    for _ in range(_PASSES):
        found = found / column_norms(found).clamp(min=_TINY)
        gram = found.mT @ found
        gram.diagonal(dim1=-2, dim2=-1).add_(shift)
        lower, _ = torch.linalg.cholesky_ex(gram)
        found = torch.linalg.solve_triangular(lower.mT, found, upper=True, left=False)
    finite = torch.isfinite(found).all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    return torch.where(finite, found, 0.0)


def column_norms(matrices: torch.Tensor) -> torch.Tensor:
    """Norms of the columns of matrices (..., rows, columns), as (..., 1, columns)."""
    return torch.linalg.vector_norm(matrices, dim=-2, keepdim=True)


def first_factor(rank: int, columns: int, device: torch.device) -> torch.Tensor:
    """The right factor before the first step: numbers that look random, of (rank, columns), float32.

    They are a function of their place, computed in whole numbers, and so are the same on every device and rank. Each
    column of the factor, the last dim here, has norm 1.
    """
    words = torch.arange(1, rank * columns + 1, dtype=torch.int64, device=device)
    for factor, shift in ((0x9E3779B1, 15), (0x85EBCA77, 13), (0xC2B2AE3D, 16)):
        words = words * factor & _WORD
        words = words ^ words >> shift
    numbers = (words.double() / 2.0**31 - 1.0).view(rank, columns)
    return (numbers / torch.linalg.vector_norm(numbers, dim=-1, keepdim=True)).float()

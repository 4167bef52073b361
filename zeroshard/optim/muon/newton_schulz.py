"""Newton-Schulz iteration: approximates the orthogonal matrix nearest to a matrix, with matrix products only.

    X <- X / |X|,  then `ns_steps` times  X <- a X + b (X X') X + c (X X')^2 X

The iteration applies a quintic polynomial to the singular values, which moves each towards 1; with the usual
coefficients they end between 0.7 and 1.2, which is accurate enough for an update (Jordan et al. 2024, "Muon: an
optimizer for hidden layers").

There are two methods. `standard` iterates on X in bfloat16, with the same bits as torch.optim.Muon. `gram` iterates on
the small square X X' in float16, and multiplies X by the product of the polynomials at the end: less work for matrices
that are far from square. Squares of rounded values lose digits, so it restarts from X after two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zeroshard.errors import PlanError

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
METHODS = ("standard", "gram")
_RESTART = 2


def orthogonalize(matrices: torch.Tensor, hyper: Mapping[str, Any]) -> torch.Tensor:
    """Roughly orthogonal matrices of the same shape.

    Args:
        matrices: (rows, columns) or (batch, rows, columns), bfloat16; not changed.
        hyper: `ns_method`, `ns_steps`, `ns_coefficients` and `eps`, the minimum of the norm that is divided by.
    """
    if not matrices.numel():
        return matrices.clone()
    tall = matrices.size(-2) > matrices.size(-1)
    wide = matrices.mT if tall else matrices
    methods: Mapping[str, Callable[..., torch.Tensor]] = {"standard": _standard, "gram": _gram}
    found = methods[hyper["ns_method"]](wide, hyper["ns_coefficients"], hyper["ns_steps"], hyper["eps"])
    return found.mT if tall else found


def check_method(hyper: Mapping[str, Any]) -> None:
    """Raises PlanError for hyper-parameters out of range."""
    if hyper["ns_method"] not in METHODS:
        raise PlanError(f"optimizer ns_method {hyper['ns_method']!r}: it is one of {', '.join(METHODS)}")
    if not 0 <= hyper["ns_steps"] < 100:
        raise PlanError(f"optimizer ns_steps {hyper['ns_steps']!r}: a whole number from 0 to 99 is needed")
    if len(hyper["ns_coefficients"]) != 3:
        raise PlanError(f"optimizer ns_coefficients {hyper['ns_coefficients']!r}: three numbers are needed")


def _standard(wide: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    a, b, c = coefficients
    multiply_add = torch.addmm if wide.dim() == 2 else torch.baddbmm
    x = wide / _norm(wide).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, polynomial, x, beta=a)
    return x


def _gram(wide: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    if wide.size(-2) == wide.size(-1):
        return _standard(wide, coefficients, steps, eps)  # X X' is not smaller than X
    a, b, c = coefficients
    values = wide.float()
    # Divided before the cast: float16 has no values below 6e-8, and clipped gradients may be smaller than that.
    x = (values / _norm(values).clamp(min=eps)).half()
    identity = torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
    for first in range(0, steps, _RESTART):
        count = min(_RESTART, steps - first) if first == 0 else steps - first
        gram = x @ x.mT
        product: torch.Tensor | None = None
        for step in range(count):
            polynomial = a * identity + b * gram + c * (gram @ gram)
            product = polynomial if product is None else polynomial @ product
            if step < count - 1:
                gram = polynomial @ gram @ polynomial
        if product is not None:
            x = product @ x
        if first:
            break
    return x.to(wide.dtype)


def _norm(matrices: torch.Tensor) -> torch.Tensor:
    """Frobenius norm of each matrix, in a shape by which `matrices` can be divided."""
    return matrices.norm() if matrices.dim() == 2 else matrices.norm(dim=(-2, -1), keepdim=True)

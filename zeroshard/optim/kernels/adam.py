"""Adam and AdamW on a flat region in one pass: unscale, clip, decay, moments, master weights, compute-dtype copy.

Bytes read and written per parameter with bf16 compute: gradient 2 (4 in float32), master 8, moments 16, parameter 2: 28
(30); with split master weights parameter 4 and remainder 4 instead: 26 (28). Scalars are read from a table on the
device, so the host need not know whether the step is skipped:

    row of a segment: [ on | coefficient | decay | step size | 1/sqrt(correction 2) | eps | 1-beta1 | beta2 | 1-beta2 ]

`decay` is 1 - lr * weight_decay where it is decoupled (arXiv:1711.05101), else weight_decay itself, added to the
gradient. Rejected: hyper-parameters as kernel arguments, which needs a launch per parameter group and a host decision.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.optim.kernels.tiles import TILE
from zeroshard.optim.split_master import join, split

COLUMNS = 9
WARPS = 4


def adam_twin(
    master: torch.Tensor,
    param: torch.Tensor | None,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    tiles: torch.Tensor,
    rows: torch.Tensor,
    *,
    decoupled: bool,
) -> None:
    """The same update in plain PyTorch: used on a CPU, and the reference for tests of the kernel.

    Args:
        master: float32 (n,), or int16 (n,) if it is the remainder beside a bfloat16 `param`; updated.
        param: (n,) in compute dtype, overwritten with the new master; or None.
        grad: (n,) in any floating dtype.
        first, second: float32 (n,), the moments; updated.
        tiles: int64 (tiles, 3), see `tile_table`.
        rows: float32 (segments, 9), see the module.
    """
    values = join(param, master) if master.dtype == torch.int16 and param is not None else master
    for start, end, segment in tiles.tolist():
        on, coefficient, decay, step_size, correction, eps, one_beta1, beta2, one_beta2 = rows[segment]
        if not bool(on):
            continue
        cut = slice(start, end)
        g, p = grad[cut].float() * coefficient, values[cut]
        if decoupled:
            p = p * decay
        else:
            g = g + p * decay
        first[cut] += (g - first[cut]) * one_beta1
        second[cut] = second[cut] * beta2 + g * g * one_beta2
        p = p - step_size * first[cut] / (second[cut].sqrt() * correction + eps)
        if param is not None and master.dtype == torch.int16:
            param[cut], master[cut] = split(p)
            continue
        master[cut] = p
        if param is not None:
            param[cut] = p.to(param.dtype)


def adam_kernel(
    master: torch.Tensor,
    param: torch.Tensor | None,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    tiles: torch.Tensor,
    rows: torch.Tensor,
    *,
    decoupled: bool,
) -> None:
    """The update as one Triton launch; arguments as `adam_twin`."""
    if tiles.shape[0]:
        _compiled()[(tiles.shape[0],)](
            master,
            param if param is not None else master,
            grad,
            first,
            second,
            tiles,
            rows,
            DECOUPLED=decoupled,
            COPY=param is not None,
            SPLIT=master.dtype == torch.int16,
            COLUMNS=COLUMNS,
            TILE=TILE,
            num_warps=WARPS,
        )


def _compiled() -> Any:
    from zeroshard.optim.kernels.adam_triton import adam_step

    return adam_step

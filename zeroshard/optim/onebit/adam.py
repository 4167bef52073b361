"""1-bit Adam (Tang et al. 2021, arXiv:2102.02888, algorithm 1): Adam, then momentum SGD with Adam's frozen scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.optim.onebit.base import ActivePieces, Groups, OneBitUpdate

DEFAULTS: Mapping[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "eps_inside_sqrt": False,
    "weight_decay": 0.0,
}


class OneBitAdamUpdate(OneBitUpdate):
    """The update of this rank's regions."""

    def _step_frozen(self, updated: ActivePieces, groups: Groups, before: Sequence[torch.Tensor]) -> None:
        self._step_warmup(updated, groups)

"""The update of state in host memory by native code: a rule on flat regions, its arithmetic done by a host kernel.

One pass reads the gradient in the dtype in which it came down, unscales and clips it, and writes master weights,
moments and the compute-dtype parameter, which may lie where the gradient was. Regions on the device, and rules without
a kernel, are updated by the rule itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.optim.host.choose import host_kernel
from zeroshard.optim.host.steps import Piece, host_step
from zeroshard.optim.regions import Region, Run
from zeroshard.optim.rules import Rule
from zeroshard.optim.updates import FlatUpdate


class KernelUpdate(FlatUpdate):
    """A rule whose runs in host memory are updated by native code."""

    def __init__(self, rule: Rule, regions: Sequence[Region], groups: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(rule, regions, groups)
        self._step = host_step(rule)
        self._kernel = None if self._step is None else host_kernel()

    def __str__(self) -> str:
        return f"{self._rule.name}, {self._kernel or 'PyTorch'}"

    def _update_run(
        self, region: Region, state: Sequence[torch.Tensor], run: Run, hyper: Mapping[str, Any], coefficient: float
    ) -> None:
        on_host = region.memory is not None and region.master.dtype == torch.float32
        if self._step is None or self._kernel is None or not on_host:
            super()._update_run(region, state, run, hyper, coefficient)
            return
        cut = slice(run.start, run.end)
        param = None if region.param is None else region.param[cut]
        piece = Piece(region.master[cut], param, region.grad()[cut], [kind[cut] for kind in state])
        self._step(self._kernel, piece, hyper, run.step, coefficient)

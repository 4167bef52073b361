"""The update of state in host memory by native code: a rule on flat regions whose arithmetic a host kernel does.

One pass reads the gradient in the dtype in which it was copied to the host, unscales and clips it, and writes master
weights, moments and the compute-dtype parameter, which may use the gradient's memory. If only a share of the state is
offloaded, the regions on the GPU are updated by Adam's kernel there. Rules without a kernel run in PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from zeroshard.optim.host.choose import host_kernel
from zeroshard.optim.host.scalars import adam_scalars, scalars_of
from zeroshard.optim.kernels.adam import COLUMNS, adam_kernel
from zeroshard.optim.kernels.tiles import tile_table
from zeroshard.optim.regions import Region, Run
from zeroshard.optim.rules import ADAM, ADAMW, Rule
from zeroshard.optim.updates import FlatUpdate
from zeroshard.tiers import values_of


class KernelUpdate(FlatUpdate):
    """A FlatUpdate that updates regions in host memory by native code, if there is a host kernel for the rule."""

    def __init__(self, rule: Rule, regions: Sequence[Region], groups: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(rule, regions, groups)
        self._scalars = scalars_of(rule)
        self._kernel = None if self._scalars is None else host_kernel()
        self._tiles: dict[int, torch.Tensor] = {}
        if rule in (ADAM, ADAMW) and find_spec("triton") is not None:
            for number, region in enumerate(regions):
                if region.allocate is None and region.master.is_cuda and region.master.dtype != torch.float64:
                    self._tiles[number] = tile_table(region.pieces, region.master.device)

    def __str__(self) -> str:
        return f"{self._rule.name}, {self._kernel or 'PyTorch'}"

    def apply_region(
        self, number: int, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]
    ) -> None:
        """See PiecewiseUpdate."""
        tiles = self._tiles.get(number)
        if tiles is None:
            super().apply_region(number, coefficient, active, hyper)
            return
        region, steps = self.regions[number], self._steps[number]
        first, second = (values_of(row) for row in self._state[number])
        rows = [[0.0] * COLUMNS for _ in steps]
        for index, group in enumerate(region.groups):
            if group >= 0 and active[region.first_flag + index]:
                steps[index] += 1
                scalars = adam_scalars(hyper[group], steps[index], coefficient)
                rows[index] = [1.0, *scalars.values[: COLUMNS - 1]]
        # A fresh pinned tensor: its memory is not reused before the copy has run.
        table = torch.tensor(rows, dtype=torch.float32).pin_memory().to(region.master.device, non_blocking=True)
        decoupled = bool(self._rule.defaults["decoupled"])
        adam_kernel(region.master, region.param, region.grad(), first, second, tiles, table, decoupled=decoupled)

    def _update_run(
        self, region: Region, state: Sequence[torch.Tensor], run: Run, hyper: Mapping[str, Any], coefficient: float
    ) -> None:
        on_host = region.allocate is not None and region.master.dtype == torch.float32
        if self._scalars is None or self._kernel is None or not on_host:
            super()._update_run(region, state, run, hyper, coefficient)
            return
        scalars, grad = self._scalars(hyper, run.step, coefficient), region.grad()
        # Beside state on disk in pieces of a window's size: its pieces take turns with these at the cores.
        step = region.window_numel or run.end - run.start
        for low in range(run.start, run.end, step):
            cut = slice(low, min(low + step, run.end))
            param = None if region.param is None else region.param[cut]
            self._kernel.step(scalars, region.master[cut], grad[cut], [kind[cut] for kind in state], param)

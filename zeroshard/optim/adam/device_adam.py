"""Adam whose decisions are made on the device: skipping, clipping, and bias correction by the steps that were applied.

The host launches the same kernels whatever the gradients are. The update kernel reads a table with a row of scalars per
segment, which a few small operations fill in each step; see `kernels.adam`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.optim.kernels.adam import adam_kernel, adam_twin
from zeroshard.optim.kernels.tiles import tile_table
from zeroshard.optim.regions import Region
from zeroshard.optim.rules import Rule
from zeroshard.optim.updates import RuleState, refuse_unsupported
from zeroshard.tiers import values_of

HYPER = 8
"""Hyper-parameters per optimizer group in the table on the device."""


def _hyper(group: Mapping[str, Any]) -> tuple[float, ...]:
    """[ lr | beta1 | beta2 | bias correction | decay | eps | 1-beta1 | 1-beta2 ], see `kernels.adam`."""
    (beta1, beta2), lr, decay = map(float, group["betas"]), float(group["lr"]), float(group["weight_decay"])
    shrink = 1.0 - lr * decay if group["decoupled"] else decay
    corrected = float(bool(group["bias_correction"]))
    return lr, beta1, beta2, corrected, shrink, float(group["eps"]), 1.0 - beta1, 1.0 - beta2


class DeviceAdam(RuleState):
    """The update of all regions of this rank.

    Args:
        rule: ADAM or ADAMW.
        device: where the regions are; not on a GPU the PyTorch twin computes the same.
    """

    def __init__(self, rule: Rule, regions: Sequence[Region], device: torch.device) -> None:
        super().__init__(rule, regions)
        self._run = adam_kernel if device.type == "cuda" else adam_twin
        self._moments = [
            None if region.allocate else [values_of(row) for row in rows]
            for region, rows in zip(regions, self._state, strict=True)
        ]
        # State that rests off the device is updated in pieces, which have tiles of their own (StreamedAdam).
        self._tiles = [tile_table(region.pieces if region.allocate is None else (), device) for region in regions]
        group_of = [group for region in regions for group in region.groups]
        self._group_of = torch.tensor(group_of, dtype=torch.int64).to(device)
        self._owned = self._group_of >= 0
        self._used = frozenset(group for group in group_of if group >= 0)
        self._hyper = torch.zeros(max(group_of, default=-1) + 1, HYPER, dtype=torch.float64, device=device)
        self._seen: tuple[tuple[float, ...], ...] = ()
        self._row_of = self._group_of.clamp(min=0)
        self._steps = torch.zeros(len(group_of), dtype=torch.float64, device=device)
        self._rows = torch.zeros(len(group_of), 9, dtype=torch.float32, device=device)

    def prepare(self, coefficient: torch.Tensor, active: torch.Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """Fill the table for one step.

        Args:
            coefficient: float64 scalar on the device that unscales, averages and clips.
            active: bool (segments,) on the device; all False skips the step.
            groups: hyper-parameters of each optimizer group; those of groups without parameters here are not read.
        """
        if not self._used:
            return
        if not (self._rows.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.refresh(groups)
        on = active & self._owned
        self._steps += on
        lr, beta1, beta2, corrected, *fixed = self._hyper[self._row_of].unbind(1)
        steps = self._steps.clamp(min=1.0)
        step_size = lr / torch.where(corrected > 0, 1.0 - torch.pow(beta1, steps), 1.0)
        correction = torch.where(corrected > 0, 1.0 - torch.pow(beta2, steps), 1.0).rsqrt()
        shrink, eps, one_beta1, one_beta2 = fixed
        columns = [on.double(), coefficient.expand_as(steps), shrink, step_size, correction]
        self._rows.copy_(torch.stack([*columns, eps, one_beta1, beta2, one_beta2], dim=1))

    def refresh(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy changed hyper-parameters to the device, to the memory from which a captured graph of a step reads them.

        Raises:
            UsageError: a group has an option that this update does not support.
        """
        refuse_unsupported(self._rule.name, groups)
        none = (0.0,) * HYPER
        values = tuple(_hyper(groups[i]) if i in self._used else none for i in range(len(self._hyper)))
        if values != self._seen:
            host = torch.tensor(values, dtype=torch.float64).reshape(len(values), HYPER)
            # A fresh pinned tensor: its memory is not reused before the copy has run.
            self._hyper.copy_(host.pin_memory() if self._hyper.is_cuda else host, non_blocking=True)
            self._seen = values

    def apply(self, number: int) -> None:
        """Update region `number` with the prepared table."""
        region, moments = self.regions[number], self._moments[number]
        assert moments is not None, "state that rests off the device is updated in pieces"
        first, second = moments
        rows = self._rows[region.first_flag : region.first_flag + len(region.layout.segments)]
        decoupled = bool(self._rule.defaults["decoupled"])
        self._run(
            region.master, region.param, region.grad(), first, second, self._tiles[number], rows, decoupled=decoupled
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments, by the same names as in FlatUpdate, and the number of updates of each segment."""
        return {**super().tensors(), "steps": self._steps}

    def step_counts(self) -> list[list[float]]:
        """See FlatState."""
        counts = self._steps.tolist()
        return [counts[region.first_flag : region.first_flag + len(region.groups)] for region in self.regions]

    def set_step(self, region: int, index: int, count: float) -> None:
        """See FlatState."""
        self._steps[self.regions[region].first_flag + index] = count

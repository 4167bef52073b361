"""Applies an optimizer to regions: our flat rules, or any element-wise torch optimizer over slices.

Both take gradients as they rest (any dtype, summed over ranks) and one coefficient that unscales, averages and clips.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from zeroshard.errors import UsageError
from zeroshard.optim.regions import Region
from zeroshard.optim.rules import Rule
from zeroshard.optim.views import StateViews

UNRULY = ("maximize", "differentiable", "amsgrad")
"""Options of torch's optimizers that our rules don't have."""


class StatefulUpdate(Protocol):
    """An optimizer's state on this rank, as checkpoints see it.

    Attributes:
        lazy: whether a parameter has no state before its first update.
    """

    lazy: bool

    def tensors(self) -> dict[str, torch.Tensor]:
        """State of this rank by a stable name, for saving."""
        ...

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over saved state; names as in `tensors`."""
        ...

    def counters(self) -> dict[str, Any]:
        """JSON-able counters, for saving."""
        ...

    def load_counters(self, counters: Mapping[str, Any]) -> None: ...


class UpdateMethod(StatefulUpdate, Protocol):
    """An optimizer that the host tells what to do."""

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        """One step: gradients times `coefficient`; parameters with `active` False are left alone, decay included."""
        ...


class FlatUpdate(StateViews):
    """A rule on flat regions, with its state in one flat float32 tensor per region and kind."""

    lazy = False

    def __init__(self, rule: Rule, regions: Sequence[Region]) -> None:
        self._rule = rule
        self._regions = regions
        self._state = [[torch.zeros_like(region.master, dtype=torch.float32) for _ in rule.state] for region in regions]
        self._steps = [[0] * len(region.layout.segments) for region in regions]

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        for number, group in enumerate(hyper):
            late = [key for key in UNRULY if group.get(key)]
            if late:
                raise UsageError(
                    f"optimizer group {number}: {late[0]} was switched on after the model was sharded with a "
                    f"{self._rule.name} that lacks it; set it before shard()"
                )
        for region, state, steps in zip(self._regions, self._state, self._steps, strict=True):
            on = active[region.first_flag : region.first_flag + len(steps)]
            runs = region.runs(on, steps)
            for run in runs:
                cut = slice(run.start, run.end)
                grad = scaled(region.grad()[cut], coefficient)
                pieces = [moment[cut] for moment in state]
                self._rule.update(region.master[cut], grad, pieces, hyper[run.hyper], run.step)
                if region.param is not None:
                    region.param[cut].copy_(region.master[cut])
            for index, was_active in enumerate(on):
                steps[index] += was_active and region.hyper[index] >= 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{index}.{name}": tensor
            for index, tensors in enumerate(self._state)
            for name, tensor in zip(self._rule.state, tensors, strict=True)
        }

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])

    def state_names(self) -> tuple[str, ...]:
        return self._rule.state

    def _states(self, region: int) -> dict[str, torch.Tensor]:
        return dict(zip(self._rule.state, self._state[region], strict=True))

    def state_view(self, region: int, index: int, name: str) -> torch.Tensor | None:
        return flat_state_view(self._regions[region], self._states(region), index, name)

    def counters(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        self._steps = [[int(step) for step in steps] for steps in counters["steps"]]


class TorchUpdate(StateViews):
    """Any element-wise torch optimizer, given one slice tensor per parameter that this rank updates a part of.

    Args:
        optimizer: builds the optimizer over (hyper-parameter group -> slices).
    """

    lazy = True

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        regions: Sequence[Region],
        hyper: Sequence[Mapping[str, Any]],
    ) -> None:
        self._regions = regions
        self._slices: list[tuple[Region, int, int, int, torch.nn.Parameter]] = []
        members: list[list[torch.nn.Parameter]] = [[] for _ in hyper]
        for region in regions:
            for index, low, high in region.pieces:
                if region.hyper[index] >= 0:
                    part = torch.nn.Parameter(region.master[low:high], requires_grad=True)
                    self._slices.append((region, index, low, high, part))
                    members[region.hyper[index]].append(part)
        self._groups = [index for index, parts in enumerate(members) if parts]
        options = [{"params": members[index], **_options(hyper[index])} for index in self._groups]
        self._inner = optimizer(options, **_accepted(optimizer, defaults)) if options else None

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        if self._inner is None:
            return
        for group, index in zip(self._inner.param_groups, self._groups, strict=True):
            group.update(_options(hyper[index]))
        for region, index, low, high, part in self._slices:
            on = active[region.first_flag + index]
            part.grad = scaled(region.grad()[low:high], coefficient) if on else None
        self._inner.step()
        for region, _, low, high, part in self._slices:
            if region.param is not None and part.grad is not None:
                region.param[low:high].copy_(part.detach())
            part.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if self._inner is not None:
            for number, (*_, part) in enumerate(self._slices):
                for name, value in self._inner.state.get(part, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[f"{number}.{name}"] = value
        return found

    def state_names(self) -> tuple[str, ...]:
        states = [] if self._inner is None else [self._inner.state.get(part, {}) for *_, part in self._slices]
        return tuple({name: None for state in states for name, value in state.items() if _by_element(value)})

    def state_view(self, region: int, index: int, name: str) -> torch.Tensor | None:
        if self._regions[region].hyper[index] < 0:
            return None
        for owner, number, _, _, part in self._slices:
            if owner is self._regions[region] and number == index and self._inner is not None:
                value = self._inner.state.get(part, {}).get(name)
                return value if _by_element(value) else None
        return torch.empty(0, device=self._regions[region].master.device)

    def counters(self) -> dict[str, Any]:
        return {}  # torch counts in its state; and counters are saved once for all ranks, whose slices differ

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        assert not counters

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the inner optimizer's state from saved tensors; torch itself makes it only at the first step."""
        for number, (*_, part) in enumerate(self._slices):
            prefix = f"{number}."
            # Torch keeps its step counts, scalars, on the CPU.
            state = {
                key.removeprefix(prefix): value.to(part.device) if value.dim() else value.clone()
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            if self._inner is not None:
                self._inner.state.pop(part, None)
                if state:
                    self._inner.state[part] = state


def flat_state_view(region: Region, state: Mapping[str, torch.Tensor], index: int, name: str) -> torch.Tensor | None:
    """`StateViews.state_view` of a region whose states are flat tensors of its own size, by name."""
    if region.hyper[index] < 0 or name not in state:
        return None
    for number, low, high in region.pieces:
        if number == index:
            return state[name][low:high]
    return state[name][:0]


def _by_element(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def scaled(grad: torch.Tensor, coefficient: float) -> torch.Tensor:
    """The gradient in float32 times `coefficient`; in place where it is float32 already, for the step consumes it."""
    if grad.dtype != torch.float32:
        grad = grad.float()
    return grad if coefficient == 1.0 else grad.mul_(coefficient)


def _accepted(optimizer: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that the constructor takes; AdamW, for one, records some that only its base class does."""
    names = inspect.signature(optimizer).parameters.values()
    if any(name.kind is inspect.Parameter.VAR_KEYWORD for name in names):
        return dict(defaults)
    taken = {name.name for name in names}
    return {key: value for key, value in defaults.items() if key in taken}


def _options(hyper: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hyper.items() if key not in ("params", "param_names")}

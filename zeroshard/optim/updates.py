"""Applies an optimizer to regions: flat rules, or any element-wise torch optimizer over slices.

Both use reduced gradients (any dtype, summed over ranks) and one coefficient that unscales, averages and clips.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Protocol

import torch

from zeroshard.errors import CheckpointError, UsageError
from zeroshard.optim.regions import Region, Run
from zeroshard.optim.rules import Rule
from zeroshard.optim.saved_state import FlatState, SavedState, Scalar, StatePart
from zeroshard.optim.windows import Windows
from zeroshard.tiers import Row, RowPart, store

_PART_NUMEL = 1 << 22
"""Elements of 16-bit parameters that are converted to float32 at a time."""
UNSUPPORTED_OPTIONS = ("maximize", "differentiable", "amsgrad")
"""Options of torch's optimizers that zeroshard's rules don't support."""


class StatefulUpdate(SavedState, Protocol):
    """An optimizer's state on this rank, for checkpoints and for counting its bytes."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """All state tensors of this rank."""
        ...


class UpdateMethod(StatefulUpdate, Protocol):
    """An optimizer that the host controls: it knows in each step which parameters are updated."""

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        """One step.

        Args:
            coefficient: factor of the gradients, which unscales, averages and clips.
            active: of all trainable parameters, whether each is updated; others are not changed, not even by decay.
            hyper: hyper-parameters of each optimizer group.
        """
        ...


class PiecewiseUpdate(UpdateMethod, Protocol):
    """An optimizer that updates each region by itself, so that regions can be updated at different times."""

    regions: Sequence[Region]

    def check(self, hyper: Sequence[Mapping[str, Any]]) -> None:
        """Raises UsageError for hyper-parameters that a step does not support."""
        ...

    def begin(self, numbers: Sequence[int]) -> None:
        """A step begins. It updates these regions in this order, and others at any time. Raises SpillError."""
        ...

    def apply_region(
        self, number: int, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]
    ) -> None:
        """One step of region `number`; arguments as `apply`. Regions may be updated by several threads at once.

        Raises:
            SpillError: its state is on a disk that failed.
        """
        ...


class DeviceUpdate(StatefulUpdate, Protocol):
    """An optimizer that tensors on the device control, so that the host need not know which parameters are updated."""

    regions: Sequence[Region]

    def prepare(self, coefficient: torch.Tensor, active: torch.Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """Prepare one step; called once per step, before `apply`. May communicate with other ranks.

        Args:
            coefficient: float64 scalar on the device that unscales, averages and clips.
            active: bool (trainable parameters,) on the device; False leaves a parameter unchanged.
            groups: hyper-parameters of each optimizer group.
        """
        ...

    def apply(self, number: int) -> None:
        """Update region `number`."""
        ...


class CompressedUpdate(UpdateMethod, Protocol):
    """An optimizer that, from some step on, uses each rank's own gradients and averages in compressed form."""

    @property
    def compressing(self) -> bool:
        """Whether the coming step uses gradients that are not reduced."""
        ...


class HostDriven(SavedState):
    """A DeviceUpdate as an UpdateMethod: the host knows which parameters are updated."""

    def __init__(self, inner: DeviceUpdate, device: torch.device) -> None:
        self._inner = inner
        self._device = device

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        scale = torch.full((), coefficient, dtype=torch.float64, device=self._device)
        self._inner.prepare(scale, torch.tensor(active, dtype=torch.bool, device=self._device), hyper)
        for number in range(len(self._inner.regions)):
            self._inner.apply(number)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._inner.tensors()

    def state_keys(self, region: int) -> tuple[str, ...] | None:
        """See SavedState."""
        return self._inner.state_keys(region)

    def state_parts(self) -> Iterator[StatePart]:
        """See SavedState."""
        return self._inner.state_parts()

    def reset_state(self) -> None:
        """See SavedState."""
        self._inner.reset_state()

    def open_part(
        self, region: int, index: int, dtypes: Mapping[str, torch.dtype], scalars: Mapping[str, Scalar]
    ) -> dict[str, RowPart]:
        """See SavedState."""
        return self._inner.open_part(region, index, dtypes, scalars)


class RuleState(FlatState):
    """The state of a rule: one row per region and name."""

    def __init__(self, rule: Rule, regions: Sequence[Region]) -> None:
        self._rule = rule
        self.regions = regions
        self._state = [[region.new_state() for _ in rule.state] for region in regions]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state that is in memory, by number of the region and name."""
        return {
            f"{index}.{name}": row.values
            for index, (_, state) in enumerate(self.flat_states())
            for name, row in state.items()
            if row.values is not None
        }

    def flat_states(self) -> list[tuple[Region, dict[str, Row]]]:
        """See FlatState."""
        named = [dict(zip(self._rule.state, state, strict=True)) for state in self._state]
        return list(zip(self.regions, named, strict=True))


class FlatUpdate(RuleState):
    """A rule on flat regions.

    Args:
        groups: hyper-parameters of each optimizer group, for rules whose state does not start from 0.
    """

    def __init__(self, rule: Rule, regions: Sequence[Region], groups: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(rule, regions)
        self._windows = Windows(regions, self._state)
        self._groups = groups
        if rule.initial is not None:
            self._fill(rule.initial, groups)
        self._steps = [[0] * len(region.layout.segments) for region in regions]

    def _fill(self, name: str, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the state of each parameter to its group's initial value; padding stays 0."""
        for region, state in zip(self.regions, self._state, strict=True):
            for index, low, high in region.pieces:
                for row in state if region.groups[index] >= 0 else ():
                    value = torch.tensor(float(groups[region.groups[index]][name]), dtype=row.dtype)
                    store(row, slice(low, high), value.expand(high - low))

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        self.check(hyper)
        self.begin(range(len(self.regions)))
        for number in range(len(self.regions)):
            self.apply_region(number, coefficient, active, hyper)

    def begin(self, numbers: Sequence[int]) -> None:
        """See PiecewiseUpdate."""
        self._windows.begin(numbers)

    def check(self, hyper: Sequence[Mapping[str, Any]]) -> None:
        """See PiecewiseUpdate."""
        refuse_unsupported(self._rule.name, hyper)

    def apply_region(
        self, number: int, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]
    ) -> None:
        """See PiecewiseUpdate."""
        region, steps = self.regions[number], self._steps[number]
        on = active[region.first_flag : region.first_flag + len(steps)]
        for opened, state in self._windows.open(number):
            for run in opened.runs(on, steps):
                self._update_run(opened, state, run, hyper[run.group], coefficient)
            if "master" in region.off_device:
                opened.refresh_untouched(active)
        for index, was_active in enumerate(on):
            steps[index] += was_active and region.groups[index] >= 0

    def _update_run(
        self, region: Region, state: Sequence[torch.Tensor], run: Run, hyper: Mapping[str, Any], coefficient: float
    ) -> None:
        """Update one run."""
        if region.without_master:
            self._update_low(region, state, run, hyper, coefficient)
            return
        cut = slice(run.start, run.end)
        grad = scaled(region.grad()[cut], coefficient).to(region.master.dtype)
        self._rule.update(region.master[cut], grad, [kind[cut] for kind in state], hyper, run.step)
        if region.param is not None:
            region.param[cut].copy_(region.master[cut])

    def _update_low(
        self, region: Region, state: Sequence[torch.Tensor], run: Run, hyper: Mapping[str, Any], coefficient: float
    ) -> None:
        """Update 16-bit parameters in float32 arithmetic, part by part, and round parameters and state afterwards."""
        for low in range(run.start, run.end, _PART_NUMEL):
            cut = slice(low, min(run.end, low + _PART_NUMEL))
            kept = [region.master[cut], *(kind[cut] for kind in state)]
            values, *moments = [tensor.float() for tensor in kept]
            self._rule.update(values, scaled(region.grad()[cut], coefficient), moments, hyper, run.step)
            for tensor, value in zip(kept, (values, *moments), strict=True):
                tensor.copy_(value)

    def step_counts(self) -> Sequence[Sequence[float]]:
        """See FlatState."""
        return self._steps

    def set_step(self, region: int, index: int, count: float) -> None:
        """See FlatState."""
        self._steps[region][index] = int(count)

    def reset_state(self) -> None:
        """See SavedState."""
        super().reset_state()
        if self._rule.initial is not None:
            self._fill(self._rule.initial, self._groups)


class TorchUpdate(SavedState):
    """Any element-wise torch optimizer over slices: of each parameter, the part that this rank updates.

    Args:
        optimizer: the optimizer's class.
        defaults: the user's optimizer's defaults.
        hyper: hyper-parameters of each optimizer group.
    """

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
                if region.groups[index] >= 0:
                    part = torch.nn.Parameter(region.master[low:high], requires_grad=True)
                    self._slices.append((region, index, low, high, part))
                    members[region.groups[index]].append(part)
        self._groups = [index for index, parts in enumerate(members) if parts]
        options = [{"params": members[index], **group_options(hyper[index])} for index in self._groups]
        self._inner = optimizer(options, **accepted_defaults(optimizer, defaults)) if options else None

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        if self._inner is None:
            return
        for group, index in zip(self._inner.param_groups, self._groups, strict=True):
            group.update(group_options(hyper[index]))
        for region, index, low, high, part in self._slices:
            on = active[region.first_flag + index]
            part.grad = scaled(region.grad()[low:high], coefficient).to(part.dtype) if on else None
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

    def state_keys(self, region: int) -> tuple[str, ...] | None:
        """See SavedState: torch makes a parameter's state at its first update."""
        return None

    def state_parts(self) -> Iterator[StatePart]:
        """See SavedState."""
        for region, index, low, high, part in self._slices:
            state = {} if self._inner is None else self._inner.state.get(part, {})
            elements: dict[str, torch.Tensor] = {}
            scalars: dict[str, Scalar] = {}
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    scalars[name] = value.detach().cpu()
                elif isinstance(value, Real):
                    scalars[name] = _number(value)
                elif isinstance(value, torch.Tensor) and value.shape == part.shape:
                    elements[name] = value
                elif value is not None:
                    where = region.layout.segments[index].name
                    raise CheckpointError(
                        f"optimizer state {name!r} of {where!r} is {_described(value)}: neither one number per element "
                        "of the parameter nor a single number, so it can't be resharded, and can't be saved"
                    )
            if elements or scalars:
                parts = {name: RowPart.of(value) for name, value in elements.items()}
                yield StatePart(self._number_of(region), index, low, high, parts, scalars)

    def _number_of(self, region: Region) -> int:
        return next(number for number, other in enumerate(self._regions) if other is region)

    def reset_state(self) -> None:
        """See SavedState."""
        if self._inner is not None:
            self._inner.state.clear()

    def open_part(
        self, region: int, index: int, dtypes: Mapping[str, torch.dtype], scalars: Mapping[str, Scalar]
    ) -> dict[str, RowPart]:
        """See SavedState."""
        for owner, number, _, _, part in self._slices:
            if owner is self._regions[region] and number == index and self._inner is not None:
                elements = {
                    name: torch.empty(part.shape, dtype=dtype, device=part.device) for name, dtype in dtypes.items()
                }
                # Torch keeps its step counts, scalars, on the CPU.
                self._inner.state[part] = {**{name: _copied(value) for name, value in scalars.items()}, **elements}
                return {name: RowPart.of(values) for name, values in elements.items()}
        return {}


def _number(value: Real) -> bool | int | float:
    """A Python number, also for a number of NumPy."""
    if isinstance(value, (bool, int, float)):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _copied(value: Scalar) -> Scalar:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def refuse_unsupported(name: str, hyper: Sequence[Mapping[str, Any]]) -> None:
    """Raises UsageError if a group has been given an option that zeroshard's rules don't support."""
    for number, group in enumerate(hyper):
        late = [key for key in UNSUPPORTED_OPTIONS if group.get(key)]
        if late:
            raise UsageError(
                f"optimizer group {number}: {late[0]} was switched on after the model was sharded with a {name} that "
                "does not support it; set it before shard()"
            )


def scaled(grad: torch.Tensor, coefficient: float) -> torch.Tensor:
    """The gradient times `coefficient`, in float64 if it is float64, else in float32.

    A gradient that has this dtype already is multiplied in place: the step consumes it.
    """
    if grad.dtype not in (torch.float32, torch.float64):
        grad = grad.float()
    return grad if coefficient == 1.0 else grad.mul_(coefficient)


def accepted_defaults(optimizer: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that the constructor accepts; AdamW, for one, records some that only its base class accepts."""
    names = inspect.signature(optimizer).parameters.values()
    if any(name.kind is inspect.Parameter.VAR_KEYWORD for name in names):
        return dict(defaults)
    taken = {name.name for name in names}
    return {key: value for key, value in defaults.items() if key in taken}


def group_options(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in hyper.items() if key not in ("params", "param_names")}

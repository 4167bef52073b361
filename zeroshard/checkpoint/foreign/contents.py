"""What a checkpoint of another system holds, in our terms.

Parameters by name with their master weights and moments, buffers, names that are only another name of a parameter, and
the counters of the run. All tensors are `Lazy`: a `Contents` of a terabyte is a few kilobytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zeroshard.checkpoint.foreign.inert import Inert
from zeroshard.checkpoint.foreign.stored import Lazy, StoredTensor
from zeroshard.checkpoint.manifest import check_name
from zeroshard.errors import CheckpointError


@dataclass(frozen=True)
class Parameter:
    """A parameter. `weight` is the fp32 master where there is one, `compute` the dtype that forward used, if known;
    `step` counts its updates."""

    name: str
    weight: Lazy
    moments: Mapping[str, Lazy] = field(default_factory=dict)
    step: float | None = None
    trainable: bool = True
    compute: torch.dtype | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape


@dataclass(frozen=True)
class Group:
    """Parameters that share hyper-parameters (`options`: lr, betas, weight_decay and so on)."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Scaler:
    """A loss scale. `since_overflow` counts steps; None where the scale is static."""

    scale: float
    dynamic: bool
    window: int | None = None
    factor: float | None = None
    minimum: float | None = None
    hysteresis: int | None = None
    since_overflow: int | None = None


@dataclass(frozen=True)
class Contents:
    """All of a checkpoint.

    optimizer, scheduler_type: names of the classes, None where nothing says.
    accumulation: micro-batches of a step.
    complete: False if frozen parameters were left out when it was saved.
    aliases: another name of a parameter -> the name that it is stored under (tied weights).
    left_out: what was there and could not be kept, with the reason, for the user to see.
    """

    origin: str
    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Lazy] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    optimizer: str | None = None
    scaler: Scaler | None = None
    steps: int = 0
    skipped: int = 0
    samples: int = 0
    accumulation: int = 1
    scheduler: Mapping[str, Any] | None = None
    scheduler_type: str | None = None
    complete: bool = True
    client_state: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (*self.parameters, *self.buffers, *self.aliases):
            check_name(name)
        for alias, name in self.aliases.items():
            if name not in self.parameters or alias in self.parameters:
                raise CheckpointError(f"{self.origin}: {alias!r} can't be another name of {name!r}")
        for parameter in self.parameters.values():
            for key, moment in parameter.moments.items():
                if moment.shape != parameter.shape:
                    raise CheckpointError(
                        f"{self.origin}: {key} of {parameter.name!r} has shape {list(moment.shape)}, "
                        f"the parameter {list(parameter.shape)}"
                    )

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], Lazy]]:
        """Weights of parameters, then buffers: name, global shape, and the tensor to be read."""
        for name, parameter in self.parameters.items():
            yield name, parameter.shape, parameter.weight
        for name, buffer in self.buffers.items():
            yield name, buffer.shape, buffer


def optimizer_name(groups: Sequence[Group], moments: Iterable[str], said: str | None = None) -> str | None:
    """The class of the optimizer, from what it left; None where that could be several.

    Args:
        said: what a config calls it; DeepSpeed's "Adam" decouples the weight decay unless told otherwise.
    """
    decoupled = {group.options.get("decoupled_weight_decay") for group in groups} - {None}
    kinds = set(moments)
    if kinds == {"exp_avg", "exp_avg_sq"}:
        if len(decoupled) == 1:
            return "AdamW" if decoupled.pop() else "Adam"
        return "AdamW" if said is not None and said.lower() in ("adam", "adamw") else None
    return "SGD" if kinds == {"momentum_buffer"} else None


def plain(value: Any, where: str, left_out: list[str]) -> Any:
    """A value as JSON has it: tuples become lists, sets sorted lists; what JSON can't hold is noted in `left_out`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        left_out.append(f"{where}: {value} is no number of JSON")
        return None
    if isinstance(value, dict):
        return {str(key): plain(item, f"{where}.{key}", left_out) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]", left_out) for index, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, where, left_out) for item in value), key=str)
    if isinstance(value, StoredTensor) and value.shape in ((), (1,)):
        return plain(value.read().item(), where, left_out)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    what = f"an object {value.of}" if isinstance(value, Inert) else f"a {type(value).__name__}"
    left_out.append(f"{where}: {what} is no plain data")
    return None

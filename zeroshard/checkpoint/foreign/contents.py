"""The contents of a checkpoint of any system: parameters with master weights and moments, buffers, aliases, counters.

All tensors are `Lazy`, so the `Contents` of a terabyte take a few kilobytes.
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
    """A parameter.

    Attributes:
        weight: the fp32 master weight, if there is one.
        step: how often it was updated; None if that is not known.
        compute: the dtype that the forward used; None if that is not known.
    """

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
    """A loss scale. `since_overflow` counts steps; None for a static scale."""

    scale: float
    dynamic: bool
    window: int | None = None
    factor: float | None = None
    minimum: float | None = None
    hysteresis: int | None = None
    since_overflow: int | None = None


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        origin: the system and the ranks that saved it, in words.
        aliases: other names of tied parameters, with the name that they are stored under.
        optimizer, scheduler_type: names of the classes; None if they are not known.
        accumulation: micro-batches per step.
        complete: False if frozen parameters were left out when it was saved.
        left_out: what could not be kept, with the reason, in sentences for the user.
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
            if name not in self.parameters or alias in self.parameters or alias in self.buffers:
                raise CheckpointError(f"{self.origin}: {alias!r} can't be another name of {name!r}")
        for parameter in self.parameters.values():
            for key, moment in parameter.moments.items():
                if moment.shape != parameter.shape:
                    raise CheckpointError(
                        f"{self.origin}: {key} of {parameter.name!r} has shape {list(moment.shape)}, "
                        f"the parameter {list(parameter.shape)}"
                    )

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], Lazy]]:
        """Weights of parameters, then buffers: name, shape, and the tensor."""
        for name, parameter in self.parameters.items():
            yield name, parameter.shape, parameter.weight
        for name, buffer in self.buffers.items():
            yield name, buffer.shape, buffer


def optimizer_name(groups: Sequence[Group], moments: Iterable[str], said: str | None = None) -> str | None:
    """The class of the optimizer, by its state; None if it may be several.

    Args:
        said: its name in the config; DeepSpeed's "Adam" decouples the weight decay unless configured otherwise.
    """
    decoupled = {group.options.get("decoupled_weight_decay") for group in groups} - {None}
    kinds = set(moments)
    if kinds == {"exp_avg", "exp_avg_sq"}:
        if len(decoupled) == 1:
            return "AdamW" if decoupled.pop() else "Adam"
        return "AdamW" if said is not None and said.lower() in ("adam", "adamw") else None
    return "SGD" if kinds == {"momentum_buffer"} else None


def plain(value: Any, where: str, left_out: list[str]) -> Any:
    """A JSON value: tuples become lists, sets sorted lists; values that JSON lacks are noted in `left_out`."""
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

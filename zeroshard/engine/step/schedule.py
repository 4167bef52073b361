"""The learning-rate scheduler beside an engine: checks it, steps it, and saves and loads its state.

    step(lr_kwargs) -> arguments, checked before the update -> the update -> scheduler.step(**arguments)

Any object with torch's three methods is accepted, so that schedulers of libraries work. Errors are found before
anything is changed: wrong arguments before the update, a wrong state before a load. To check a state it is loaded into
the scheduler itself, which then gets its own state back. Rejected: a copy of the scheduler, which would copy the
optimizer.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.lr_scheduler import LRScheduler

from zeroshard.checkpoint.values import as_numbers, kind_differences, pack, unpack
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.optim.optimizer import ShardedOptimizer


@runtime_checkable
class Schedule(Protocol):
    """The methods that a scheduler must have."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def check_schedule(scheduler: object, optimizer: ShardedOptimizer | None) -> None:
    """Raises UsageError if the object is no scheduler, or sets the rates of another optimizer."""
    if not isinstance(scheduler, Schedule):
        raise UsageError(
            f"lr_scheduler is a {type(scheduler).__name__}, which lacks step(), state_dict() or load_state_dict(); "
            "give a torch scheduler, or a callable from the optimizer to one"
        )
    if optimizer is None or not isinstance(scheduler, LRScheduler):
        return
    own = {id(group) for group in optimizer.param_groups}
    if not any(id(group) in own for group in scheduler.optimizer.param_groups):
        raise UsageError(
            f"lr_scheduler is a {type(scheduler).__name__} over another optimizer, so its rates would reach no "
            "parameter; build it over the optimizer that you pass, or give a callable: lambda optimizer: ..."
        )


def step_arguments(scheduler: object, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of the scheduler's next step. Raises UsageError where it does not take them, or needs others."""
    arguments = dict(given or {})
    if not isinstance(scheduler, Schedule):
        return arguments
    try:
        inspect.signature(scheduler.step).bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"the step of {type(scheduler).__name__}: {error}; give what it needs as "
            'engine.step(lr_kwargs={"metrics": loss}). Nothing was updated'
        ) from error
    return arguments


def advance(scheduler: Any, arguments: Mapping[str, Any]) -> None:
    """Step the scheduler after an update. Raises UsageError if it refuses, as OneCycleLR does at its end."""
    try:
        scheduler.step(**arguments)
    except ValueError as error:
        name = type(scheduler).__name__
        raise UsageError(f"the update was made, but {name} takes no further step: {error}") from error


def saved_schedule(scheduler: object) -> dict[str, Any]:
    """A scheduler's kind and state for a checkpoint. Raises CheckpointError for state that JSON can't hold."""
    if not isinstance(scheduler, Schedule):
        raise CheckpointError(f"scheduler is a {type(scheduler).__name__}, which is none: it has no state_dict()")
    return {"type": type(scheduler).__name__, "state": pack(as_numbers(scheduler.state_dict()), "scheduler")}


class ScheduleLoad:
    """The load of a saved state into a scheduler.

    Attributes:
        problem: why the state can't be loaded; None if it can.
    """

    def __init__(self, scheduler: object, saved: Mapping[str, Any] | None, optimizer: ShardedOptimizer | None) -> None:
        kind = type(scheduler).__name__
        self.problem: str | None = None
        self._scheduler = scheduler
        if not isinstance(scheduler, Schedule):
            self.problem = f"scheduler is a {kind}, which is none: it has no load_state_dict()"
        elif saved is None or saved["type"] not in (None, kind):
            theirs = "none" if saved is None else saved["type"]
            self.problem = f"its scheduler is {theirs}, this run's {kind}"
        else:
            own = scheduler.state_dict()
            self._state = _with_counters(own, unpack(saved["state"]))
            self.problem = (
                _kind_problem(scheduler, own, unpack(saved["state"]))
                or _count_problem(kind, own, self._state)
                or _load_problem(scheduler, own, self._state, optimizer)
            )
        if self.problem is not None:
            self.problem += "; to keep this run's as it is, load with load_lr_scheduler_states=False"

    def apply(self) -> None:
        """Load the state; only if there is no problem."""
        assert isinstance(self._scheduler, Schedule)
        self._scheduler.load_state_dict(self._state)


def _with_counters(own: Any, saved: Any) -> Any:
    """The saved state with the one kind of dict that torch's schedulers need and JSON does not tell from others."""
    if isinstance(own, Counter) and isinstance(saved, dict):
        return Counter(saved)
    if isinstance(own, dict) and isinstance(saved, dict):
        return {key: _with_counters(own.get(key), value) for key, value in saved.items()}
    if isinstance(own, list) and isinstance(saved, list) and len(own) == len(saved):
        return [_with_counters(mine, theirs) for mine, theirs in zip(own, saved, strict=True)]
    return saved


def _count_problem(kind: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """A problem if nested schedulers (SequentialLR) differ in number; torch would load only some without an error."""
    for key, mine in own.items():
        theirs = saved.get(key)
        if _nested(mine) and (not isinstance(theirs, list) or len(theirs) != len(mine)):
            count = len(theirs) if isinstance(theirs, list) else 0
            return f"its {kind} is made of {count} schedulers, this run's of {len(mine)}"
    return None


def _kind_problem(scheduler: Schedule, own: Mapping[str, Any], saved: Any) -> str | None:
    """Values of other kinds, and names of the scheduler's methods, which torch's schedulers would take for state."""
    for key in saved if isinstance(saved, dict) else ():
        if isinstance(key, str) and callable(getattr(type(scheduler), key, None)):
            return f"scheduler.{key} is a method, no state"
    return next(iter(kind_differences(saved, as_numbers(own), "scheduler", same_length=False)), None)


def _nested(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(item, dict) for item in value)


def _load_problem(
    scheduler: Schedule, own: dict[str, Any], saved: dict[str, Any], optimizer: ShardedOptimizer | None
) -> str | None:
    """Load the state, then the scheduler's own state again; returns the error. The optimizer's groups are restored."""
    groups = [] if optimizer is None else optimizer.param_groups
    before = [dict(group) for group in groups]
    tensors = [
        (value, value.clone()) for group in groups for value in group.values() if isinstance(value, torch.Tensor)
    ]
    try:
        scheduler.load_state_dict(dict(saved))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, UsageError) as error:
        return f"its {type(scheduler).__name__} can't be taken over ({type(error).__name__}: {error})"
    finally:
        try:
            scheduler.load_state_dict(own)
        finally:
            for group, old in zip(groups, before, strict=True):
                group.update(old)
            for tensor, value in tensors:
                tensor.copy_(value)
    return None

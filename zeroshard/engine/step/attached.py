"""Finds the stepper and the optimizer of a sharded model.

Both are attributes of the model, like its handle. A model that was sharded without an optimizer has neither.
"""

from __future__ import annotations

from torch import nn

from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.step.step_base import StepperBase
from zeroshard.errors import UsageError
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.sources import Source

_STEPPER = "_zeroshard_stepper"
_OPTIMIZER = "_zeroshard_optimizer"


def attach_optimizer(model: nn.Module, source: Source, stepper: StepperBase) -> ShardedOptimizer:
    """The optimizer of a sharded model whose steps `stepper` runs; the model knows both from here on."""
    optimizer = ShardedOptimizer(source.groups, source.defaults, stepper, source.name, source.client)
    model.__dict__[_STEPPER], model.__dict__[_OPTIMIZER] = stepper, optimizer
    stepper.groups = optimizer.param_groups
    return optimizer


def stepper_of(model: nn.Module) -> StepperBase:
    """The stepper of a model that was sharded with an optimizer."""
    found = model.__dict__.get(_STEPPER) if isinstance(model, nn.Module) else None
    if found is None:
        handle_of(model)
        raise UsageError("the model was sharded without an optimizer: nothing can be stepped; pass one to shard()")
    assert isinstance(found, StepperBase)
    return found


def find_stepper(model: nn.Module) -> StepperBase | None:
    """The model's stepper, None where it was sharded without an optimizer."""
    return stepper_of(model) if _STEPPER in model.__dict__ else None


def find_optimizer(model: nn.Module) -> ShardedOptimizer | None:
    """The model's optimizer, None where it was sharded without one."""
    found: ShardedOptimizer | None = model.__dict__.get(_OPTIMIZER)
    return found


def detach_optimizer(model: nn.Module) -> None:
    """The model has no stepper and no optimizer any more."""
    model.__dict__.pop(_STEPPER, None)
    model.__dict__.pop(_OPTIMIZER, None)

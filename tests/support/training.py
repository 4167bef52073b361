"""Train a task sharded, and unsharded as a reference, and compare what comes out.

The reference is one process that sees what all ranks see: gradients are summed over ranks as autograd gives them,
averaged, clipped by a float64 norm and handed to the plain torch optimizer over float32 parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.support.models import Batch, Task
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.builder import Recipe

Values = Mapping[str, torch.Tensor]
SEED = 7


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters; with an epsilon that keeps it from inflating rounding noise of near-zero gradients."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-6)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum: small differences of gradients stay small."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True)
class Setting:
    """How to train; see zeroshard.shard for the fields of the same name."""

    plan: int | Recipe = 3
    steps: int = 4
    micro: int = 1
    clip: float = 0.0
    no_sync: bool = False
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    units: tuple[str, ...] | None = None

    def at(self, plan: int | Recipe) -> Setting:
        """The same under another plan."""
        return replace(self, plan=plan)


@dataclass
class Outcome:
    """What a training gave: this rank's losses, the norms before clipping, and all parameters, whole, as float32."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def build(task: Task) -> nn.Module:
    """The task's model with the weights that every training of it starts from."""
    torch.manual_seed(SEED)
    return task.build()


def shard_task(task: Task, setting: Setting) -> tuple[nn.Module, ShardedOptimizer]:
    """The task's model and optimizer, sharded."""
    model = build(task)
    model, optimizer = zeroshard.shard(
        model,
        setting.optimizer(model),
        plan=setting.plan,
        units=setting.units,
        accumulate=setting.micro > 1,
        clip_norm=setting.clip,
    )
    assert optimizer is not None
    return model, optimizer


def train_sharded(task: Task, setting: Setting, rank: int) -> Outcome:
    """Train sharded over the default process group; called by all ranks."""
    model, optimizer = shard_task(task, setting)
    scheduler = setting.schedule(optimizer) if setting.schedule else None
    outcome = Outcome()
    for step in range(setting.steps):
        for micro in range(setting.micro):
            local = setting.no_sync and micro < setting.micro - 1
            with zeroshard.no_sync(model) if local else nullcontext():
                loss = task.loss(model, Batch(step, micro, rank))
                (loss / setting.micro).backward()
            outcome.losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        outcome.norms.append(zeroshard.get_global_grad_norm(model) or 0.0)
        if scheduler is not None:
            scheduler.step()
    outcome.parameters = full_parameters(model)
    zeroshard.close(model)
    return outcome


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, whole, as float32; called by all ranks."""
    return {name: value.float().clone() for name, value in zeroshard.iterate_full_parameters(model)}


def train_reference(task: Task, setting: Setting, world: int, rank: int = 0) -> Outcome:
    """Train unsharded, in this process alone, on the batches of `world` ranks; losses are those of `rank`."""
    model = build(task)
    truth = copy.deepcopy(model).float()
    optimizer = setting.optimizer(truth)
    scheduler = setting.schedule(optimizer) if setting.schedule else None
    outcome = Outcome()
    for step in range(setting.steps):
        total: dict[str, torch.Tensor] = {}
        for member in range(world):
            losses: list[float] = []
            own: dict[str, torch.Tensor] = {}
            for micro in range(setting.micro):
                loss = task.loss(model, Batch(step, micro, member))
                (loss / setting.micro).backward()
                losses.append(float(loss.detach()))
                _take_gradients(model, own, wide=setting.micro > 1)
            outcome.losses += losses if member == rank else []
            for name, gradient in own.items():
                total[name] = total[name] + gradient if name in total else gradient
        outcome.norms.append(_hand_over(truth, total, world, setting.clip))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        _refresh(model, truth)
    outcome.parameters = {name: value.detach().clone() for name, value in truth.named_parameters()}
    return outcome


def shared_reference(task: Task, setting: Setting, world: int) -> Outcome:
    """`train_reference` on rank 0 alone, given to all ranks of the default process group; losses are those of rank 0.

    The reference does the work of all ranks, so a copy of it on each would cost more than all that is compared to it.
    """
    held = [train_reference(task, setting, world) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held, src=0)
    assert held[0] is not None
    return held[0]


def _take_gradients(model: nn.Module, total: dict[str, torch.Tensor], *, wide: bool) -> None:
    """Add one micro-batch's gradients, in float32 where they are accumulated, and drop them."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.float() if wide else parameter.grad
        total[name] = total[name] + gradient if name in total else gradient
        parameter.grad = None


def _hand_over(truth: nn.Module, total: dict[str, torch.Tensor], world: int, clip: float) -> float:
    squares = sum((float(value.double().square().sum()) for value in total.values()), 0.0)
    norm = math.sqrt(squares) / world
    coefficient = (1.0 / world) * (min(1.0, clip / (norm + 1e-6)) if clip else 1.0)
    for name, parameter in truth.named_parameters():
        parameter.grad = total[name].float() * coefficient if name in total else None
    return norm


def _refresh(model: nn.Module, truth: nn.Module) -> None:
    with torch.no_grad():
        for parameter, source in zip(model.parameters(), truth.parameters(), strict=True):
            parameter.copy_(source)


def assert_same(actual: Values, expected: Values, what: str = "") -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys(), f"{what}: {actual.keys() ^ expected.keys()}"
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, f"{what}: {_worst(actual, expected)}; different: {different}"


def assert_close(actual: Values, expected: Values, tolerance: float = 1e-6, what: str = "") -> None:
    """Largest absolute difference at most `tolerance`."""
    assert actual.keys() == expected.keys(), f"{what}: {actual.keys() ^ expected.keys()}"
    name, difference = _worst(actual, expected)
    assert difference <= tolerance, f"{what}: {name} differs by {difference:g}"


def _worst(actual: Values, expected: Values) -> tuple[str, float]:
    largest = {name: float((actual[name] - expected[name]).abs().max()) for name in expected if expected[name].numel()}
    # NaN compares false with everything; it must not pass as a small difference.
    nan = [name for name, value in largest.items() if math.isnan(value)]
    if nan:
        return nan[0], math.inf
    return max(largest.items(), key=lambda item: item[1], default=("", 0.0))

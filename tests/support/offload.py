"""Trains with state in host memory, and with the device's own step on PyTorch twins: streamed state's reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

import zeroshard
from tests.support.models import Batch, Task
from tests.support.training import Outcome, Setting, adamw, assert_same, build, full_parameters
from zeroshard.engine.build import build_handle
from zeroshard.engine.core.streams import Streams
from zeroshard.engine.native import close
from zeroshard.engine.outside_step.gathered import mark_parameters
from zeroshard.engine.planning import make_plan
from zeroshard.engine.step.attached import attach_optimizer
from zeroshard.engine.step.device_stepper import DeviceStepper
from zeroshard.engine.step.regions_of import make_regions
from zeroshard.optim.adam.device_adam import DeviceAdam
from zeroshard.optim.clients import torch_source
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.rules import ADAMW
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES
from zeroshard.plan.policy import ExecutionPolicy, HostUpdate, OnNonFinite

CPU = torch.device("cpu")
PIECE = 512
"""Elements of a streamed piece: small, so that a unit of a test's model takes several turns through the buffers."""


def recipe(stage: int, param: str | None = None, master: str | None = None, clip: float = 0.0) -> Recipe:
    """A recipe without offload, in float32 or with `param` as compute dtype."""
    cast = None if param is None else "bfloat16" if param == "bf16" else "float16"
    policy = ExecutionPolicy(cast_inputs=cast, clip_norm=clip)
    return Recipe(sharding=STAGES[stage], precision=Precision(param=param, master=master), policy=policy)


def offloaded(
    plain: Recipe, update: HostUpdate = HostUpdate.PROCESSOR, ratio: float = 1.0, *, param: bool = False
) -> Recipe:
    """The same recipe with the optimizer's state in host memory, and with `param` the parameters."""
    return replace(plain, offload=Offload(ratio, param, update, stream_numel=PIECE))


def on_device(task: Task, setting: Setting, streams: Streams | None = None) -> tuple[nn.Module, ShardedOptimizer]:
    """What shard() gives on a GPU for AdamW without offload, here with the twin of its kernel."""
    model = build(task)
    source = torch_source(adamw(model), allow_untested=False)
    plan = make_plan(model, setting.plan, source, CPU, accumulate=setting.micro > 1)
    handle = build_handle(model, plan, device=CPU, streams=streams)
    mark_parameters(handle)
    stepper = DeviceStepper(handle, DeviceAdam(ADAMW, make_regions(handle, source.groups), CPU), None)
    return model, attach_optimizer(model, source, stepper)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Task,
    setting: Setting,
    rank: int,
    *,
    drain: bool = False,
) -> Outcome:
    """Steps of a sharded model, with `drain` each finished before the next forward; closes it."""
    outcome = Outcome()
    for step in range(setting.steps):
        for micro in range(setting.micro):
            loss = task.loss(model, Batch(step, micro, rank))
            (loss / setting.micro).backward()
            outcome.losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        if drain:
            zeroshard.drain(model)
    outcome.parameters = full_parameters(model)
    close(model)
    return outcome


def assert_a_skip_changes_nothing(
    task: Task,
    plain: Recipe,
    away: Callable[[Recipe], Recipe],
    rank: int,
    *,
    skipped: int,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> None:
    """Of four steps in float16 one overflows: parameters end alike wherever state rests, by `plain` or by `away`."""
    plain = replace(plain, policy=replace(plain.policy, on_nonfinite=OnNonFinite.SKIP))
    outcomes: list[dict[str, torch.Tensor]] = []
    for plan in (plain, away(plain)):
        model, scaler = build(task), LossScaler("cpu")
        model, stepped = zeroshard.shard(model, optimizer(model), plan=plan, scaler=scaler)
        for number in range(4):
            loss = task.loss(model, Batch(number, 0, rank)) * scaler.scale
            (loss * (float("inf") if number == skipped else 1.0)).backward()
            stepped.step()
            stepped.zero_grad()
        assert int(scaler.total_skips) == 1
        outcomes.append(full_parameters(model))
        zeroshard.close(model)
    assert_same(outcomes[1], outcomes[0], "a skipped step in the middle")

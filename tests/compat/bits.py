"""Three steps of a model at a stage, and the same three in plain torch: equal to the last bit.

The ranks have different batches. The reference computes them one after the other, adds the gradients in rank order and
halves the sum, which is exact at two ranks, as is what the engine does. SGD in fp32, so nothing hides a difference.

Every leaf outside of blocks is a unit of its own. With the sizes of real models embeddings, heads and projections
are, and a forward may read one outside of the unit's own; at the sizes of this table all would lie in the root unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

import zeroshard
from zeroshard.sharding import units

STEPS, RATE, SMALL_LEAF = 3, 0.05, 128
CPU = torch.device("cpu")


class Trainable(Protocol):
    """A model with its inputs and loss; the same ones again for the same seed."""

    def build(self, seed: int = 0) -> nn.Module: ...

    def draw(self, seed: int) -> dict[str, Any]: ...

    def loss(self, output: Any) -> torch.Tensor: ...


@dataclass
class Trained:
    """What three steps gave: the losses of this rank, and all parameters."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]


def differences(task: Trainable, stage: int, rank: int, world: int) -> list[str]:
    """What is not the same as in plain torch, in words; called by all ranks."""
    plain = _plain(task, rank, world)
    sharded = _sharded(task, stage, rank)
    found = [f"losses {sharded.losses} for {plain.losses}"] if sharded.losses != plain.losses else []
    if sharded.parameters.keys() != plain.parameters.keys():
        return [*found, f"names {sharded.parameters.keys() ^ plain.parameters.keys()}"]
    for name, value in plain.parameters.items():
        if not torch.equal(sharded.parameters[name], value):
            gap = (sharded.parameters[name] - value).abs().max()
            found.append(f"{name}: {float(gap):.1e} apart")
    return found


def losses_of_both(
    task: Trainable, stage: int, rank: int, world: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """This rank's losses on a device where sums come in an order of their own: sharded, and in plain torch."""
    plain = _plain(task, rank, world, device)
    return _sharded(task, stage, rank, device).losses, plain.losses


def _plain(task: Trainable, rank: int, world: int, device: torch.device = CPU) -> Trained:
    model = task.build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[float] = []
    for step in range(STEPS):
        each = [_one_batch(task, model, _batch(task, step, peer, device)) for peer in range(world)]
        losses.append(each[rank][0])
        for name, parameter in model.named_parameters():
            parameter.grad = _mean([gradients.get(name) for _, gradients in each])
        optimizer.step()
    return Trained(losses, {name: parameter.detach() for name, parameter in model.named_parameters()})


def _one_batch(task: Trainable, model: nn.Module, batch: Mapping[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = task.loss(model(**batch))
    loss.backward()
    return float(loss.detach()), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def _mean(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Of all ranks: one without a gradient counts as zero, and none has one where all have none."""
    there = [gradient for gradient in gradients if gradient is not None]
    if not there:
        return None
    total = there[0].clone()
    for gradient in there[1:]:
        total += gradient
    return total / len(gradients)


def _sharded(task: Trainable, stage: int, rank: int, device: torch.device = CPU) -> Trained:
    units.OWN_UNIT_NUMEL = SMALL_LEAF
    config: Mapping[str, object] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = zeroshard.initialize(model=task.build(), config=config)
    losses: list[float] = []
    for step in range(STEPS):
        loss = task.loss(engine(**_batch(task, step, rank, device)))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    whole = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(engine.module)}
    engine.destroy()
    return Trained(losses, whole)


def _batch(task: Trainable, step: int, rank: int, device: torch.device) -> dict[str, Any]:
    """The inputs of a step, and torch's seed as it is at each of them: some models draw in their forwards."""
    torch.manual_seed(100 * step + rank)
    drawn = task.draw(100 * step + rank)
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in drawn.items()}

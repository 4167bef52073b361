"""A model that is a sequence of blocks, trained in the usual order and by the vertical schedule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.support.models import VOCABULARY, WIDTH, Batch, Block
from tests.support.training import Outcome, adamw, full_parameters
from zeroshard.engine.core.streams import Streams
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.builder import Recipe


def sequence(depth: int = 3) -> nn.Sequential:
    """A causal language model whose embedding, blocks and head are units, and whose norm is in the root."""
    blocks = [Block() for _ in range(depth)]
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    )


class TiedModel(nn.Module):
    """A language model whose head reads the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied_blocks(model: nn.Module) -> list[Any]:
    assert isinstance(model, TiedModel)
    return [model.embedding, *model.blocks, model.head]


def cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over tokens."""
    return F.cross_entropy(output.flatten(0, 1).float(), labels.flatten())


@dataclass(frozen=True)
class Way:
    """How to train.

    Attributes:
        micro: micro-batches of a step.
        vertical: by the vertical schedule; else one after the other.
        no_sync: in the usual order, reduce gradients with the last micro-batch only.
        blocks: of the model, in which the vertical schedule goes through it.
        plain: passes the blocks in the usual order; by default the model itself does.
    """

    plan: int | Recipe = 3
    micro: int = 2
    vertical: bool = False
    no_sync: bool = True
    clip: float = 0.5
    steps: int = 3
    build: Callable[[], nn.Module] = sequence
    blocks: Callable[[nn.Module], list[Any]] | None = None
    seed: int | None = None
    scaler: Callable[[], LossScaler] | None = None
    streams: Callable[[], Streams] | None = None
    shard: dict[str, Any] = field(default_factory=dict)

    @property
    def upright(self) -> Way:
        """The same by the vertical schedule."""
        return replace(self, vertical=True)


def batches(step: int, micro: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of a step: tokens and those after them."""
    tokens = [Batch(step, number, rank).tokens() for number in range(micro)]
    return [(one[:, :-1], one[:, 1:]) for one in tokens]


def sharded(way: Way, streams: Streams | None = None) -> tuple[nn.Module, ShardedOptimizer, LossScaler | None]:
    """The model of a way, its optimizer and loss scale."""
    torch.manual_seed(7)
    model = way.build()
    scaler = None if way.scaler is None else way.scaler()
    several = {"micro_batches": way.micro} if way.vertical else {"accumulate": way.micro > 1}
    model, optimizer = zeroshard.shard(
        model,
        adamw(model),
        plan=way.plan,
        clip_norm=way.clip,
        scaler=scaler,
        streams=streams,
        **several,
        **way.shard,
    )
    return model, optimizer, scaler


class Steps:
    """Forwards and backwards of a sharded model, in the order that a way says."""

    def __init__(self, way: Way, model: nn.Module, scaler: LossScaler | None) -> None:
        self._way, self._model, self._scaler = way, model, scaler
        self._blocks = None if way.blocks is None else way.blocks(model)
        self._schedule = zeroshard.VerticalSchedule(model, cross_entropy, blocks=self._blocks) if way.vertical else None

    def run(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        """The losses of a step's micro-batches."""
        if self._schedule is not None:
            return [float(loss) for loss in self._schedule.step(pairs)]
        losses: list[float] = []
        for micro, (inputs, labels) in enumerate(pairs):
            local = self._way.no_sync and micro < len(pairs) - 1
            with zeroshard.no_sync(self._model) if local else nullcontext():
                loss = cross_entropy(self._model(inputs), labels)
                scaled = loss / len(pairs)
                (scaled if self._scaler is None else scaled.float() * self._scaler.scale).backward()
            losses.append(float(loss.detach()))
        return losses


def trained(way: Way, rank: int) -> Outcome:
    """Losses, norms and parameters after some steps; called by all ranks."""
    streams = None if way.streams is None else way.streams()
    model, optimizer, scaler = sharded(way, streams)
    steps, outcome = Steps(way, model, scaler), Outcome()
    if way.seed is not None:
        torch.manual_seed(way.seed)
    for step in range(way.steps):
        outcome.losses += steps.run(batches(step, way.micro, rank))
        optimizer.step()
        optimizer.zero_grad()
        outcome.norms.append(zeroshard.get_global_grad_norm(model) or 0.0)
    outcome.parameters = full_parameters(model)
    zeroshard.close(model)
    return outcome

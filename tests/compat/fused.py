"""Losses that take `lm_head.weight` and never call the head, so that no logits of the whole batch are ever there.

Each kind does what a library does, in torch alone: Liger computes gradients in the forward and keeps no weight,
cut-cross-entropy and TRL keep the weight and compute tiles again in the backward, others checkpoint tiles, or gather
by hand what they read. A kind is the forward of a Llama that libraries would have patched so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.compat import tiny

TILE = 5
Gather = Callable[[torch.Tensor], AbstractContextManager[object]]
HeadLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden states of all tokens, the head's weight and labels to a mean loss."""


@dataclass(frozen=True)
class FusedHead:
    """A Llama whose forward ends in such a loss; see Trainable for the methods.

    Attributes:
        head_loss: what is done with the head's weight.
        tied: whether the embedding is the head.
        frozen: whether the head is not trained.
    """

    head_loss: HeadLoss
    tied: bool = False
    frozen: bool = False

    def build(self, seed: int = 0) -> torch.nn.Module:
        model = tiny.model("llama", seed, tie_word_embeddings=self.tied)
        model.lm_head.requires_grad_(not self.frozen)

        def forward(self_: Any, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = self_.model(input_ids=input_ids).last_hidden_state[:, :-1].flatten(0, 1)
            return self.head_loss(hidden, self_.lm_head.weight, input_ids[:, 1:].flatten())

        model.forward = MethodType(forward, model)
        return model

    def draw(self, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {"input_ids": torch.randint(3, 128, (2, 9), generator=generator)}

    def loss(self, output: Any) -> torch.Tensor:
        return output


class GradientsInForward(torch.autograd.Function):
    """Loss and gradients tile by tile in the forward; the backward scales them. Nothing of the weight is kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss, hidden_gradient, weight_gradient = (
            hidden.new_zeros(()),
            torch.zeros_like(hidden),
            torch.zeros_like(weight),
        )
        for rows in _tiles(hidden):
            logits = hidden[rows] @ weight.t()
            loss += functional.cross_entropy(logits, labels[rows], reduction="sum")
            gradient = (logits.softmax(-1) - functional.one_hot(labels[rows], len(weight))) / len(labels)
            hidden_gradient[rows] = gradient @ weight
            weight_gradient += gradient.t() @ hidden[rows]
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return loss / len(labels)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        return hidden * gradients[0], weight * gradients[0] if ctx.needs_input_grad[1] else None, None


class TilesAgainInBackward(torch.autograd.Function):
    """Keeps hidden states and weight, and computes the tiles again in the backward, inside of `gather(weight)`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, gather: Gather
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.gather = gather
        sums = [
            functional.cross_entropy(hidden[rows] @ weight.t(), labels[rows], reduction="sum")
            for rows in _tiles(hidden)
        ]
        return torch.stack(sums).sum() / len(labels)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight, labels = ctx.saved_tensors
        hidden_gradient = torch.zeros_like(hidden)
        with ctx.gather(weight):
            weight_gradient = torch.zeros_like(weight)
            for rows in _tiles(hidden):
                logits = hidden[rows] @ weight.t()
                gradient = (logits.softmax(-1) - functional.one_hot(labels[rows], len(weight))) / len(labels)
                hidden_gradient[rows] = gradient @ weight * gradients[0]
                weight_gradient += gradient.t() @ hidden[rows] * gradients[0]
        return hidden_gradient, weight_gradient if ctx.needs_input_grad[1] else None, None, None


def _tiles(hidden: torch.Tensor) -> Iterator[slice]:
    return (slice(start, start + TILE) for start in range(0, len(hidden), TILE))


def _gradients_in_forward(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return GradientsInForward.apply(hidden, weight, labels)


def _tiles_again(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return TilesAgainInBackward.apply(hidden, weight, labels, lambda _: nullcontext())


def _gathered(weight: torch.Tensor) -> AbstractContextManager[object]:
    return zeroshard.GatheredParameters([weight])


def _gathered_by_hand(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with _gathered(weight):
        return TilesAgainInBackward.apply(hidden, weight, labels, _gathered)


def _linear(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), labels)


def _checkpointed(reentrant: bool) -> HeadLoss:
    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sums = [
            checkpoint(_tile_loss, hidden[rows], weight, labels[rows], use_reentrant=reentrant)
            for rows in _tiles(hidden)
        ]
        return torch.stack(sums).sum() / len(labels)

    return loss


def _tile_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")


HEAD_LOSSES: dict[str, HeadLoss] = {
    "gradients in the forward": _gradients_in_forward,
    "tiles again in the backward": _tiles_again,
    "gathered by hand, in the forward and in the backward": _gathered_by_hand,
    "linear of the weight": _linear,
    "checkpointed tiles": _checkpointed(False),
    "checkpointed tiles, reentrant": _checkpointed(True),
}

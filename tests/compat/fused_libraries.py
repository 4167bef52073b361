"""Models whose losses Liger or TRL compute from `lm_head.weight`, with the packages as they are.

On a CPU Liger's kernels run in Triton's interpreter (TRITON_INTERPRET=1), its losses for preferences in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.compat import tiny
from tests.compat.fused import FusedHead, HeadLoss


@dataclass(frozen=True)
class Patched:
    """A Llama that a library changes; see Trainable for the methods.

    Attributes:
        patch: changes the model in place.
        inputs: beside tokens and labels.
        tied: whether the embedding is the head.
    """

    patch: Callable[[nn.Module], object]
    inputs: Mapping[str, Any]
    tied: bool = False

    def build(self, seed: int = 0) -> nn.Module:
        model = tiny.model("llama", seed, tie_word_embeddings=self.tied).train()
        self.patch(model)
        return model

    def draw(self, seed: int) -> dict[str, Any]:
        tokens = torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": tokens, "labels": tokens, **self.inputs}

    def loss(self, output: Any) -> torch.Tensor:
        return output.loss


def liger(tied: bool = False) -> Patched:
    """Cross-entropy fused with the head; Liger's other kernels need a GPU."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    def patch(model: nn.Module) -> None:
        apply_liger_kernel_to_llama(model=model, rope=False, rms_norm=False, swiglu=False)

    return Patched(patch, {}, tied)


def all_of_liger(tied: bool = False) -> Patched:
    """All that Liger has for a Llama: the head, norms, rotary embeddings and the gated MLP."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    return Patched(lambda model: apply_liger_kernel_to_llama(model=model), {}, tied)


def liger_preferences(tied: bool = False) -> dict[str, FusedHead]:
    """Losses over pairs of chosen and rejected samples."""
    from liger_kernel.chunked_loss import LigerFusedLinearCPOLoss, LigerFusedLinearORPOLoss, LigerFusedLinearSimPOLoss

    def loss(kind: Any) -> HeadLoss:
        made = kind(compiled=False, chunk_size=1)

        def compute(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return made(weight, hidden.unflatten(0, (2, -1)), labels.unflatten(0, (2, -1)))[0]

        return compute

    kinds = {"ORPO": LigerFusedLinearORPOLoss, "CPO": LigerFusedLinearCPOLoss, "SimPO": LigerFusedLinearSimPOLoss}
    return {f"Liger's {name}": FusedHead(loss(kind), tied) for name, kind in kinds.items()}


def trl(tied: bool = False) -> Patched:
    """The head of TRL's trainers, which computes log-probabilities tile by tile."""
    from trl.trainer.utils import add_fused_lm_head

    return Patched(add_fused_lm_head, {"fused_lm_head": True}, tied)

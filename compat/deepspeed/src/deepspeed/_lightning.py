"""Lightning's Trainer: it divides the loss by `accumulate_grad_batches` itself, and then calls `engine.backward`.

DeepSpeed divides there once more, so that its gradients are too small by that factor: unseen with Adam, but clipping,
SGD and decay through the gradient are not what they are under DDP. Here the loss is divided once.
"""

from __future__ import annotations

import sys

from torch import nn


def divides_loss(model: nn.Module | None) -> bool:
    """Whether losses of this model come divided by the accumulation steps; not with Fabric or manual optimization."""
    found = (sys.modules.get(name) for name in ("lightning.pytorch", "pytorch_lightning"))
    kinds = tuple(module.LightningModule for module in found if module is not None)
    return isinstance(model, kinds) and bool(getattr(model, "automatic_optimization", True))

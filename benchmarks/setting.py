"""What an engine of the benchmark is built from and gives back, and the parts of a loop that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.llama import SIZES, Llama, Shape

if TYPE_CHECKING:
    from benchmarks.wire import Wire
    from zeroshard.plan.plan import Plan

BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
OPTIMIZER = "optimizer"
"""Annotation around clipping and update, by which a trace's kernels are told apart."""

MicroBatch = tuple[torch.Tensor, torch.Tensor]
"""Ids and targets, int64 (batch, length)."""


class NotInstalled(Exception):
    """The engine is not there; the measurement is left out, not failed."""


@dataclass(frozen=True)
class Setting:
    """What an engine needs to know to build the model and its step.

    Attributes:
        batch: sequences per micro-batch on each rank.
        accumulation: micro-batches per step.
        checkpointing: recompute activations, block by block.
        compiled: compile every block.
        tuned: see the module's text.
        exact: start from the very values that the other engines start from, at the price of a whole model on each GPU.
        rate: learning rate.
        offload: "none", or see the module's text.
        host_share: the share of the state off the device, for zeroshard.
        folders: with offload "nvme", on disks; what is off the device rests there, but for `kept_share` of all state.
        kept_share: the share of the state in host memory beside the disk.
        bits: of Adam's moments, 32 or 8 (zeroshard.AdamW8bit, which takes codes from torchao).
        clip: largest global norm; 0 is no clipping.
        graph: replay steps as a CUDA graph (zeroshard, and the floor).
        spare: GiB in which units may stay gathered, for zeroshard.
        cap_gib: memory of the device that may be used; None is all of it.
        length: tokens of a sequence, for those who plan.
        fp8: "none", or the recipe in which linear layers multiply (zeroshard, and torchao's on FSDP2).
        fp8_layers: which of them, by zeroshard: "auto", or names with commas between; torchao's are those of blocks.
    """

    engine: str
    device: torch.device
    size: str = "1b"
    batch: int = 4
    accumulation: int = 1
    checkpointing: bool = False
    compiled: bool = False
    tuned: bool = False
    exact: bool = False
    rate: float = 1e-4
    offload: str = "none"
    host_share: float = 1.0
    folders: tuple[str, ...] = ()
    kept_share: float = 0.0
    bits: int = 32
    clip: float = CLIP
    graph: bool = False
    spare: float = 0.0
    cap_gib: float | None = None
    length: int = 2048
    fp8: str = "none"
    fp8_layers: str = "auto"

    @property
    def shape(self) -> Shape:
        return SIZES[self.size]

    @property
    def stage(self) -> int:
        """The number at the end of the engine's name."""
        return int(self.engine[-1])


@dataclass(frozen=True)
class Trainer:
    """A model that is ready: `step` takes the micro-batches of one step and gives the loss of the last one.

    `step` never waits for the device by itself; whether the engine does is what is measured. `outside` are bytes on the
    device that torch's allocator doesn't count; they are added to what it says. `plan` gives the plan that zeroshard
    runs, None for the others. `wire` tells the bytes on the wire of a step, which it may take, as the last one. `drain`
    waits for updates that run on; `abandon` closes without keeping the parameters. `pass_over_disk` moves the bytes of
    the state on disk once in both directions, as a step does, and returns how many; the state is lost with that.
    """

    step: Callable[[Sequence[MicroBatch]], torch.Tensor]
    numel: int
    outside: int = 0
    close: Callable[[], None] = lambda: None
    plan: Callable[[], Plan | None] = lambda: None
    wire: Callable[[Callable[[], object]], Wire | None] = lambda _: None
    drain: Callable[[], None] = lambda: None
    abandon: Callable[[], None] = lambda: None
    pass_over_disk: Callable[[], int] = lambda: 0


def model_of(setting: Setting) -> Llama:
    """The model, built under whatever context the caller has opened."""
    return Llama(setting.shape, checkpointing=setting.checkpointing)


def adamw(parameters: Iterable[nn.Parameter], setting: Setting, *, fused: bool) -> torch.optim.Optimizer:
    if setting.bits == 8:
        import zeroshard

        return zeroshard.AdamW8bit(parameters, lr=setting.rate, betas=BETAS, weight_decay=DECAY)
    return torch.optim.AdamW(parameters, lr=setting.rate, betas=BETAS, weight_decay=DECAY, fused=fused)


def numel_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def backward(
    model: nn.Module, micro_batches: Sequence[MicroBatch], divisor: int = 1, autocast: str | None = None
) -> torch.Tensor:
    """Forward and backward of every micro-batch; the last loss, undivided."""
    loss = torch.zeros(())
    for ids, targets in micro_batches:
        with torch.autocast(autocast, torch.bfloat16) if autocast else nullcontext():
            loss = model(ids, targets)
        (loss if divisor == 1 else loss / divisor).backward()
    return loss.detach()

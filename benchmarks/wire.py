"""Bytes that a step gathers and reduces on each rank: FSDP2's are counted, zeroshard's are those of its plan.

A gather counts its whole output, a reduction its whole input, as `zeroshard.plan.traffic` has it; of both a ring sends
(n - 1) / n. FSDP2 lets a caller replace its collectives; those here count and do the same. Sums of single numbers, as
of the norm and of largest magnitudes, are left out of FSDP2's figure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

if TYPE_CHECKING:
    from zeroshard.plan.plan import Plan


@dataclass
class Wire:
    """Bytes of a step on one rank."""

    gathered: int = 0
    reduced: int = 0


class _Gather(DefaultAllGather):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.wire.gathered += output_tensor.nbytes
        return super().__call__(output_tensor, *args, **kwargs)


class _Reduce(DefaultReduceScatter):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.wire.reduced += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


def counted(model: nn.Module, step: Callable[[], object]) -> Wire:
    """Take a step of FSDP2; its last one, since it keeps the collectives that count."""
    wire = Wire()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_Gather(wire))
            module.set_custom_reduce_scatter(_Reduce(wire))
    step()
    return wire


def planned(plan: Plan) -> Wire:
    """The bytes of a step by zeroshard's plan, whose tests compare it with what groups report."""
    from zeroshard.plan.traffic import step_traffic

    found = step_traffic(plan).nbytes
    return Wire(found.get("all-gather", 0), sum(found.values()) - found.get("all-gather", 0))

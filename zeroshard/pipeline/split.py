"""A stage whose gradients of inputs and of weights are computed apart, for zero-bubble schedules.

    input     gradients of the part's inputs, which the stage before waits for       torch.autograd.grad
    weight    later: gradients of its parameters, from what the first graph left     handed to the engine

torch puts the second kind on the parameters, where the engine shows stand-ins for gradients that it has collected. So
torch is given something else to put them on, and the engine collects them from there. Rejected: to take the stand-ins
away for that time, by which the engine would think that they were dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_weight

from zeroshard.pipeline.schedules import Collect


class _Weight:
    """What torch takes for a parameter: the node that its gradient comes to, and where it is put.

    Attributes:
        grad: the gradient, None until there is one.
    """

    requires_grad = True

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.grad_fn: Node = get_gradient_edge(parameter).node
        self.grad: torch.Tensor | None = None


def stage_class(collect: Collect) -> type[PipelineStage]:
    """A class of stages whose gradients of weights `collect` takes."""

    class SplitStage(PipelineStage):
        def backward_maybe_with_nosync(
            self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
        ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
            """As torch's; gradients of weights go to the engine."""
            if backward_type != "weight":
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            weights = [_Weight(parameter) for parameter in self.submod.parameters() if parameter.requires_grad]
            stage_backward_weight(cast("Iterator[nn.Parameter]", iter(weights)), bwd_kwargs["param_groups"])
            collect([(weight.parameter, weight.grad) for weight in weights if weight.grad is not None])
            return (), None

    return SplitStage

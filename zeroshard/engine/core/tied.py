"""Parameters that several pipeline stages hold a copy of: an embedding, and the head that reads it.

    stage 0   embedding    gradient a  --\\
                                          sum over the stages that hold it, once before each step
    stage 3   embedding    gradient b  --/

Each copy is a unit of its own with the same layout on all these stages, so that ranks at the same place hold the same
elements, and gradients can be summed element by element whatever ZeRO divides. All copies get the same update. Only the
first stage saves the parameter and counts it in sums over all stages. Rejected: keeping the parameter on one stage and
sending its values to the other in each micro-batch, which is twice the traffic of one gradient per step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.stages import Stages
from zeroshard.engine.core.gradients import Gradients
from zeroshard.engine.memory.unit import Unit
from zeroshard.engine.memory.update_view import update_grad
from zeroshard.errors import PlanError, UsageError
from zeroshard.plan.groups import UnitPlan
from zeroshard.plan.plan import Plan


@dataclass(frozen=True)
class TiedUnit:
    """One unit that other stages hold too.

    Attributes:
        stages: those that hold it, the first one first.
        over: communicator of the ranks that hold the same elements.
    """

    name: str
    stages: tuple[int, ...]
    over: Collectives


def find_tied(plan: Plan, tied: Sequence[str], stages: Stages) -> list[TiedUnit]:
    """The units of this stage of which other stages hold copies; called by all ranks.

    Args:
        tied: paths of modules that several stages hold.

    Raises:
        PlanError: a module is no unit, or differs between stages, or stages have different parameters of one name.
    """
    texts = stages.gather_text(json.dumps(_described(plan, tied, stages.place.index)))
    described: list[dict[str, Any]] = [json.loads(text) for text in texts]
    problem = next((stage["problem"] for stage in described if stage["problem"]), None)
    problem = problem or _shared_names(described) or _differing(described)
    if problem is not None:
        raise PlanError(problem)
    holders: dict[str, tuple[int, ...]] = {}
    for name in sorted({name for stage in described for name in stage["tied"]}):
        holders[name] = tuple(index for index, stage in enumerate(described) if name in stage["tied"])
    made = {
        stages_of: stages.tied_group(stages_of) for stages_of in dict.fromkeys(holders.values()) if len(stages_of) > 1
    }
    return [
        TiedUnit(name, those, made[those])
        for name, those in holders.items()
        if len(those) > 1 and stages.place.index in those
    ]


def _described(plan: Plan, tied: Sequence[str], stage: int) -> dict[str, Any]:
    """A description of this stage's parameters for the other stages."""
    units = {unit.name: unit for unit in plan.units}
    missing = next((name for name in tied if name not in units), None)
    names = [segment.name for unit in plan.units if unit.name not in tied for segment in _segments(unit)]
    problem = None
    if missing is not None:
        problem = f"tied: module {missing!r} of pipeline stage {stage} is no unit; it has {', '.join(units)}"
    elif any(group.grad_off_device for name in tied for group in units[name].groups):
        problem = "tied layers of a pipeline are not supported with gradients in host memory; keep these on the device"
    return {
        "problem": problem,
        "names": names,
        "tied": {} if problem else {name: _signature(units[name]) for name in tied},
    }


def _segments(unit: UnitPlan) -> list[Any]:
    return [segment for group in unit.groups for segment in group.layout.segments]


def _signature(unit: UnitPlan) -> str:
    return "; ".join(
        f"{segment.name} {list(segment.shape)} {group.param.dtype}{'' if group.trainable else ' frozen'}"
        for group in unit.groups
        for segment in group.layout.segments
    )


def _shared_names(described: Sequence[Mapping[str, Any]]) -> str | None:
    first: dict[str, int] = {}
    for stage, parts in enumerate(described):
        for name in parts["names"]:
            if name in first:
                return (
                    f"parameter {name!r} is on pipeline stages {first[name]} and {stage}: names are those of the whole "
                    "model, so that checkpoints of all layouts are alike. Give each stage's layers names of their own, "
                    "or say that it is one parameter: shard(..., tied=[path of its module])"
                )
            first[name] = stage
    return None


def _differing(described: Sequence[Mapping[str, Any]]) -> str | None:
    seen: dict[str, tuple[int, str]] = {}
    for stage, parts in enumerate(described):
        for name, signature in parts["tied"].items():
            first, other = seen.setdefault(name, (stage, signature))
            if other != signature:
                return (
                    f"tied module {name!r} is not the same on all pipeline stages: stage {first} has {other}, stage "
                    f"{stage} {signature}"
                )
    return None


def share_values(model: nn.Module, tied: Sequence[TiedUnit], device: torch.device) -> None:
    """Copy the first stage's values of tied modules to the other stages, before the model is sharded."""
    for one in tied:
        module = model.get_submodule(one.name)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_meta:
                raise PlanError(
                    f"tied module {one.name!r} of a pipeline has no values yet (zero.Init): its copies would differ; "
                    "build it outside of zero.Init"
                )
            value = tensor.detach().to(device).contiguous()
            one.over.wait(one.over.broadcast(value.view(-1).view(torch.uint8), 0, f"{one.name}.{name}"))
            tensor.data.copy_(value)


class TiedCopies:
    """The tied units of a running engine.

    Args:
        index: the number of this rank's stage.
    """

    def __init__(self, units: Sequence[Unit], tied: Sequence[TiedUnit], gradients: Gradients, index: int) -> None:
        of_name = {unit.plan.name: unit for unit in units}
        self._tied = [(of_name[one.name], one.over) for one in tied]
        self._gradients = gradients
        self._summed: tuple[int, int] | None = None
        self._not_first = [one.name for one in tied if one.stages[0] != index]
        for name in self._not_first:
            for group in of_name[name].groups:
                group.on_earlier_stage = True

    def on_earlier_stage(self, name: str) -> bool:
        """Whether an earlier stage holds, and so saves, the parameter or buffer of a name."""
        return any(name.startswith(f"{path}.") for path in self._not_first)

    def sum_gradients(self) -> None:
        """Sum the reduced gradients over the stages, once before a step; called by ranks of all stages.

        Raises:
            UsageError: a backward came after the sum and before the step.
        """
        gradients = self._gradients
        if not gradients.present:
            return
        now = (gradients.cleared, gradients.collected)
        if self._summed is not None and self._summed[0] == now[0]:
            if self._summed != now:
                raise UsageError(
                    "a backward after the gradients of tied pipeline stages were summed (for the norm, say) and before "
                    "the step: take the step first"
                )
            return
        self._summed = now
        for unit, over in self._tied:
            for group, received in zip(unit.trainable, gradients.received(unit), strict=True):
                over.wait(over.all_reduce(update_grad(group), unit.label))
                received[:] = [True] * len(received)
                gradients.squares.changed(group)

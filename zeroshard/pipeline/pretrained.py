"""One stage of a transformers model, by the plan of pipeline stages that the model brings (`base_model_pp_plan`).

    plan         embed_tokens | layers | norm | lm_head
    stage 0      embed_tokens, layers 0-1             the model's own forward, of ids
    stage 1      layers 2-3, norm, lm_head            the model's own forward, of what stage 0 gives

What another stage has is taken out, and what stands in its place hands on what it is given. So masks, positions and
everything else between the layers stay the model's affair, and parameters keep the names that they have in the whole.
Rejected: a list of layers, of which each would have to be given what the model's forward computes for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.errors import PlanError
from zeroshard.pipeline.partition import partition

_IDS, _EMBEDDED = "input_ids", "inputs_embeds"
CLOSE = 1e-3
"""How far the stages together may be from the whole, relative to its largest output: rounding and no more."""


class Absent(nn.Module):
    """In the place of a module that another stage has: gives what it is given first."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        # A model may look at what kind of layer it calls (its attention_type, its number).
        plain = {name: value for name, value in vars(of).items() if isinstance(value, (str, int))}
        vars(self).update({name: value for name, value in plain.items() if name not in vars(self)})

    def forward(self, given: Any = None, *_: Any, **named: Any) -> Any:
        return next(iter(named.values())) if given is None else given


class _HeadOfEmbedding(nn.Module):
    """A head whose weight is that of an embedding, which stays the module that has it."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = (embedding,)  # not a child: the weight would have two names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._embedding[0].get_parameter("weight"))


def find_parts(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """Paths of a model's layers, of what comes before them, and of what comes after. Raises PlanError."""
    cut = _Cutter(model, 1)
    count = len(list(model.get_submodule(cut.path).children()))
    return [f"{cut.path}.{number}" for number in range(count)], cut.first, cut.last


def pipeline_stage(model: nn.Module, axis: DeviceMesh, *, check: bool = True) -> tuple[nn.Module, list[str]]:
    """Cut a transformers model to this rank's stage, in place; it takes ids, or what the stage before gives.

    Args:
        axis: the ranks of all stages, in their order: `mesh["pp"]`.
        check: compute a few tokens with the whole and with its stages before it is cut, where it has values.

    Returns:
        The model, which gives the next stage's input, on the last stage logits, and what `shard(tied=...)` takes.

    Raises:
        PlanError: the model brings no plan, has fewer layers than stages, or is not what its stages make of it.
    """
    stages = axis.size()
    cut = _Cutter(model, stages)
    if check and stages > 1 and not any(parameter.is_meta for parameter in model.parameters()):
        _compare(model, cut)
    cut.keep(axis.get_local_rank())
    return model, cut.tied if axis.get_local_rank() in (0, stages - 1) and stages > 1 else []


class _Cutter:
    """Puts what other stages have aside, and back."""

    def __init__(self, model: nn.Module, stages: int) -> None:
        plan = getattr(model, "pp_plan", None)
        if not isinstance(plan, Mapping) or not plan:
            raise PlanError(
                f"{type(model).__name__} brings no plan of pipeline stages (a base_model_pp_plan); hand this rank's "
                "layers to zeroshard.shard, or write the model as a PipelineModule"
            )
        config: Any = model.config
        if getattr(config, "output_router_logits", False):
            raise PlanError(
                "output_router_logits: the loss that makes the choice of experts even needs the routers of all layers, "
                "and each pipeline stage has its own; set it to False"
            )
        self._model, self._plan, self.stages = model, plan, stages
        self._whole = type(model).forward
        self.path = next((path for path in plan if isinstance(model.get_submodule(path), nn.ModuleList)), "")
        layers = len(list(model.get_submodule(self.path).children())) if self.path else 0
        if layers < stages:
            raise PlanError(
                f"{type(model).__name__} has {layers} layers, which do not go over {stages} pipeline stages"
            )
        self._borders = partition([1] * layers, stages)
        self.first = [path for path, (taken, _) in plan.items() if _IDS in taken]
        self.last = [path for path in plan if path not in self.first and path != self.path]
        self.tied, self._heads = self._find_tied()

    def _find_tied(self) -> tuple[list[str], list[str]]:
        """The embedding that heads read their weight from, and these heads."""
        own = {path: {id(one) for one in self._model.get_submodule(path).parameters()} for path in self._plan}
        tied = [path for path in self.first if any(own[path] & own[head] for head in self.last)]
        return tied, [head for head in self.last if any(own[path] & own[head] for path in tied)]

    def keep(self, stage: int) -> dict[str, nn.Module]:
        """Leave one stage in the model; what was there instead, by path."""
        model, before = self._model, dict[str, nn.Module]()
        gone = [f"{self.path}.{layer}" for layer in range(self._borders[-1])]
        gone = [path for number, path in enumerate(gone) if not self._has(stage, number)]
        last = stage == self.stages - 1
        gone += [] if last else self.last
        gone += [] if stage == 0 else [path for path in self.first if not (last and path in self.tied)]
        heads = self._heads if last and stage > 0 else []
        for path in (*gone, *heads):
            before[path] = model.get_submodule(path)
        for path in gone:
            model.set_submodule(path, Absent(before[path]))
        for path in heads:
            model.set_submodule(path, _HeadOfEmbedding(model.get_submodule(self.tied[0])))
        vars(model)["forward"] = self._forward(stage)
        return before

    def put_back(self, before: Mapping[str, nn.Module]) -> None:
        for path, module in before.items():
            self._model.set_submodule(path, module)
        del vars(self._model)["forward"]

    def _has(self, stage: int, layer: int) -> bool:
        return self._borders[stage] <= layer < self._borders[stage + 1]

    def _forward(self, stage: int) -> Any:
        model, whole = self._model, self._whole
        taken = _IDS if stage == 0 else _EMBEDDED

        def forward(x: torch.Tensor, **named: Any) -> torch.Tensor:
            return whole(model, **{taken: x}, use_cache=False, **named).logits

        def without_head(x: torch.Tensor, **named: Any) -> torch.Tensor:
            base: Any = model.base_model
            return base(**{taken: x}, use_cache=False, **named).last_hidden_state

        return forward if stage == self.stages - 1 else without_head


def _compare(model: nn.Module, cut: _Cutter) -> None:
    """Raises PlanError where the stages one after the other give something else than the whole model."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    ids = torch.arange(4, device=device).unsqueeze(0)
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        x: torch.Tensor = ids
        for stage in range(cut.stages):
            before = cut.keep(stage)
            x = model(x)
            cut.put_back(before)
    model.train(training)
    far = float((x.float() - wanted.float()).abs().max())
    if not far <= CLOSE * float(wanted.float().abs().max()):
        raise PlanError(
            f"{type(model).__name__}: {cut.stages} stages one after the other give logits that differ from the whole "
            f"model's by {far:.3g}: its forward computes more between its layers than its plan says (a scale of the "
            "embedding, say); write it as a PipelineModule"
        )

"""A finished plan is refused where the model or the optimizer is another than it counts, before anything is sent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.errors import PlanError, UsageError
from zeroshard.plan.builder import Recipe, build_plan
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import Plan
from zeroshard.sharding.units import find_units


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)), nn.Linear(8, 2))


def _plan(**options: Any) -> Plan:
    return build_plan(find_units(_model()), Recipe(STAGES[3], **options), 1)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (_plan(moments=0), r"has 0 state tensors per parameter \(moments\), but AdamW keeps 2; .*Recipe\(moments=2\)"),
        (_plan(moments=3), r"has 3 state tensors per parameter \(moments\), but AdamW keeps 2"),
        (_plan(compressed=True), r"compressed is True in the plan, but AdamW sends gradients"),
        (_plan().with_policy(parameter_sums=2), r"policy\.parameter_sums is 2 in the plan, but AdamW has 0"),
    ],
)
def test_a_plan_for_other_optimizer_state_is_refused(plan: Plan, said: str) -> None:
    model = _model()
    with pytest.raises(PlanError, match=said):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=plan)


def test_a_plan_with_a_unit_that_the_model_lacks_is_refused_by_name() -> None:
    plan, model = _plan(), _model()
    renamed = json.loads(plan.to_json())
    renamed["units"][1]["name"] = "encoder"
    with pytest.raises(PlanError, match="the plan has a unit 'encoder', but the model has no module of this path"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=Plan.from_json(json.dumps(renamed)))


def test_a_plan_is_for_any_parameters_of_its_names_and_shapes() -> None:
    plan, model = _plan(), _model()
    zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=replace(plan, order=plan.order[::-1]))
    zeroshard.close(model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": (1, 1)}, r"shard\(mesh=\): a torch DeviceMesh or a zeroshard\.Mesh is needed, got a tuple"),
        ({"device": "cpu"}, r"shard\(device=\): a torch\.device is needed, got 'cpu'"),
        ({"device": torch.device("meta")}, r"shard\(device=\): nothing can be trained on the meta device"),
        ({"scaler": 1024.0}, r"shard\(scaler=\): a LossScaler is needed, got 1024\.0"),
        ({"tiers": "host"}, r"shard\(tiers=\): a mapping from Tier .* is needed, got 'host'"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_their_names(options: dict[str, Any], said: str) -> None:
    model = _model()
    with pytest.raises(UsageError, match=said):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), **options)


def test_a_mesh_without_data_axes_is_refused_with_what_it_needs() -> None:
    model, mesh = _model(), zeroshard.Mesh((zeroshard.MeshAxis("dp_shard", 1),))
    with pytest.raises(PlanError, match=r"the mesh \(dp_shard 1\) needs the axes \['dp_replicate', 'dp_shard'\]"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), mesh=mesh)

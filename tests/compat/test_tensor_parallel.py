"""Tensor parallelism of transformers models by their own plans, through the config of DeepSpeed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.errors import PlanError
from zeroshard.mesh import Mesh, MeshAxis
from zeroshard.plan.builder import Recipe, build_plan
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import Plan
from zeroshard.planner.trace.divided import Parts
from zeroshard.planner.trace.sources import module_source
from zeroshard.planner.trace.workload import Workload
from zeroshard.sharding.cut import Cut

pytestmark = pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "tensor_parallel": {"autotp_size": 2},
}


def _model(kind: str, heads: int = 4) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=8,
        tie_word_embeddings=kind == "Llama",
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def _ids(step: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))


def _predicted(kind: str, stage: int) -> Plan:
    """What the planner makes of the model on the meta device."""
    source = module_source(kind, lambda: _model(kind))
    mesh = Mesh(tuple(MeshAxis(name, size) for name, size in (("dp_replicate", 1), ("dp_shard", 1), ("tp", 2))))
    return build_plan(Workload(source, 1, 16, parts=Parts(tensor=2)).units, Recipe(STAGES[stage]), mesh)


def _cuts(plan: Plan) -> dict[str, tuple[tuple[int, ...], Cut | None]]:
    return {s.name: (s.shape, s.cut) for _, group in plan.groups() for s in group.layout.segments}


def _trained(rank: int, world: int, kind: str, stage: int) -> None:
    plain = _model(kind)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    engine, *_ = zeroshard.initialize(model=_model(kind), config={**CONFIG, "zero_optimization": {"stage": stage}})
    assert _cuts(engine.plan) == _cuts(_predicted(kind, stage))
    for step in range(3):
        wanted = plain(input_ids=_ids(step), labels=_ids(step)).loss
        wanted.backward()
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        found = engine(input_ids=_ids(step), labels=_ids(step)).loss
        engine.backward(found)
        engine.step()
        assert abs(float(found) - float(wanted)) < 1e-5
        found_norm = engine.get_global_grad_norm()
        assert found_norm is not None
        assert abs(found_norm - norm) < 1e-5
    state = zeroshard.full_state_dict(engine.module)
    whole = plain.state_dict()
    assert all(float((value - whole[name]).abs().max()) < 1e-5 for name, value in state.items())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_a_transformers_model_is_divided_by_its_own_plan(kind: str, stage: int) -> None:
    run_ranks(2, _trained, kind, stage)


def _refused(rank: int, world: int) -> None:
    with pytest.raises(PlanError, match="num_key_value_heads is 1, which 2 ranks do not divide"):
        zeroshard.initialize(model=_model("Llama", heads=2), config=CONFIG)


def test_heads_that_do_not_divide_are_refused() -> None:
    run_ranks(2, _refused)

"""Pipeline stages of transformers models by the plan that these bring: losses and parameters of one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.errors import PlanError
from zeroshard.parallel.divided_attention import divide_attention
from zeroshard.parallel.sequence_loader import part_of_batch
from zeroshard.parallel.sequence_loss import mean_over_sequence
from zeroshard.pipeline.pretrained import pipeline_stage

pytestmark = pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")
MICRO = 4
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "experts_implementation": "eager"}


def _model(kind: str, *, tied: bool, **others: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": tied,
        **others,
    }
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))


def _ids(step: int, reader: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * reader + micro)
    return torch.randint(0, 64, (2, 12), generator=generator)


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / MICRO


def _trained(rank: int, world: int, kind: str, tied: bool, stage: int, axis: str, others: dict[str, Any]) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    plain = _model(kind, tied=tied, **others)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", axis))
    place, reader = mesh.get_local_rank("pp"), mesh.get_local_rank(axis)
    model, shared = pipeline_stage(_model(kind, tied=tied, **others), mesh["pp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zeroshard.shard(
        model, optimizer, plan=stage, mesh=mesh, tied=shared, accumulate=True, clip_norm=0.5
    )
    part = PipelineStage(model, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(part, MICRO, loss_fn=_loss, scale_grads=False)
    for step in range(3):
        batches = [[_ids(step, other, micro) for micro in range(MICRO)] for other in range(world // 2)]
        wanted = 0.0
        for ids in (one for rows in batches for one in rows):
            loss = _loss(plain(input_ids=ids).logits, ids) / (world // 2)
            loss.backward()
            wanted += float(loss.detach())
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        reference.step()
        reference.zero_grad()
        ids, losses = torch.cat(batches[reader]), list[torch.Tensor]()
        schedule.step(
            *((ids,) if part.is_first else ()),
            target=ids if part.is_last else None,
            losses=losses if part.is_last else None,
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        total = torch.tensor(float(sum(loss.detach() for loss in losses)) / (world // 2))
        dist.all_reduce(total)
        assert abs(float(total) - wanted) < 1e-5, (kind, step)
        assert abs((zeroshard.get_global_grad_norm(model) or 0.0) - norm) < 1e-5, (kind, step)
    whole, found = dict(plain.named_parameters()), zeroshard.full_state_dict(model)
    assert found or mesh.get_local_rank(axis) > 0
    assert all(float((value - whole[name]).abs().max()) < 1e-5 for name, value in found.items()), kind
    zeroshard.close(model)


@pytest.mark.parametrize(
    ("kind", "tied", "stage", "axis", "others"),
    [
        ("Llama", True, 3, "dp_shard", {}),
        ("Llama", False, 1, "dp_shard", {}),
        ("Qwen3Moe", False, 2, "ep", EXPERTS),
        ("Gemma2", True, 2, "dp_shard", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    ],
)
def test_stages_of_a_transformers_model_train_as_the_whole(
    kind: str, tied: bool, stage: int, axis: str, others: dict[str, Any]
) -> None:
    run_ranks(4, _trained, kind, tied, stage, axis, others, timeout=300)


def _with_parts(rank: int, world: int, kind: str, stage: int, others: dict[str, Any]) -> None:
    """Two stages of two ranks each, which have parts of the same sequences."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    plain = _model(kind, tied=False, **others)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp_shard", "sp"))
    group = mesh.get_group("sp")
    model, _ = pipeline_stage(_model(kind, tied=False, **others), mesh["pp"])
    divide_attention(model, group, "sdpa")
    model, optimizer = zeroshard.shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        plan=stage,
        mesh=mesh,
        accumulate=True,
        clip_norm=0.5,
    )

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        own = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return mean_over_sequence(own, labels, group) / MICRO

    part = PipelineStage(model, mesh.get_local_rank("pp"), 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(part, MICRO, loss_fn=loss_of, scale_grads=False)
    for step in range(3):
        wanted, batches = 0.0, [_ids(step, 0, micro) for micro in range(MICRO)]
        for ids in batches:
            loss = _loss(plain(input_ids=ids, use_cache=False).logits, ids)
            loss.backward()
            wanted += float(loss.detach())
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        reference.step()
        reference.zero_grad()
        ids = torch.cat(batches)
        cut = part_of_batch({"input_ids": ids, "labels": ids}, group.rank(), 2)
        losses = list[torch.Tensor]()
        schedule.step(
            *((cut["input_ids"],) if part.is_first else ()),
            position_ids=cut["position_ids"],
            target=cut["shift_labels"] if part.is_last else None,
            losses=losses if part.is_last else None,
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        total = torch.tensor(float(sum(loss.detach() for loss in losses)) / 2)
        dist.all_reduce(total)
        assert abs(float(total) - wanted) < 1e-5, (kind, step)
        assert abs((zeroshard.get_global_grad_norm(model) or 0.0) - norm) < 1e-5, (kind, step)
    whole = dict(plain.named_parameters())
    for name, value in zeroshard.full_state_dict(model).items():
        assert float((value - whole[name]).abs().max()) < 1e-5, (kind, name)
    zeroshard.close(model)


@pytest.mark.parametrize(
    ("kind", "stage", "others"), [("Llama", 3, {}), ("Mistral", 2, {"sliding_window": 4}), ("Qwen3", 0, {})]
)
def test_stages_of_divided_sequences_train_as_the_whole(kind: str, stage: int, others: dict[str, Any]) -> None:
    run_ranks(4, _with_parts, kind, stage, others, timeout=300)


def _refused(rank: int, world: int) -> None:
    axis = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "pp"))["pp"]
    with pytest.raises(PlanError, match=r"Linear brings no plan of pipeline stages"):
        pipeline_stage(nn.Linear(2, 2), axis)
    with pytest.raises(PlanError, match=r"has 1 layers, which do not go over 2 pipeline stages"):
        pipeline_stage(_model("Llama", tied=False, num_hidden_layers=1), axis)
    with pytest.raises(PlanError, match=r"output_router_logits: the loss"):
        pipeline_stage(_model("Qwen3Moe", tied=False, output_router_logits=True, **EXPERTS), axis)
    odd = _model("Llama", tied=False)
    odd.model.embed_tokens.register_forward_hook(lambda *_: None)
    forward = type(odd.model).forward
    vars(odd.model)["forward"] = lambda *a, **k: _doubled(forward(odd.model, *a, **k))
    with pytest.raises(PlanError, match=r"2 stages one after the other give logits that differ from the whole"):
        pipeline_stage(odd, axis)


def _doubled(output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state * 2 + 1
    return output


def test_what_is_not_its_stages_is_refused() -> None:
    run_ranks(2, _refused)

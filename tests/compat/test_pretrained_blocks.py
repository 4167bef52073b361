"""Transformers models as blocks of a vertical schedule, by the plan that these bring: the bits of the usual order."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.compat.test_pretrained_stages import EXPERTS, _doubled, _ids, _model
from tests.support.distributed import run_ranks
from zeroshard.errors import PlanError
from zeroshard.pipeline.pretrained_blocks import pretrained_blocks

pytestmark = pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")
MICRO = 3


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _batch(step: int, rank: int, micro: int) -> dict[str, torch.Tensor]:
    ids = _ids(step, rank, micro)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _alike(rank: int, world: int, kind: str, tied: bool, stage: int, again: bool, others: dict[str, Any]) -> None:
    found: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for vertical in (False, True):
        model = _model(kind, tied=tied, **others)
        if again:
            model.gradient_checkpointing_enable()
        model.train()
        blocks = pretrained_blocks(model)
        several: dict[str, Any] = {"micro_batches": MICRO} if vertical else {"accumulate": True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = zeroshard.shard(model, optimizer, plan=stage, clip_norm=0.5, **several)
        schedule = zeroshard.VerticalSchedule(model, _loss, blocks=blocks)
        losses: list[float] = []
        for step in range(3):
            batches = [_batch(step, rank, micro) for micro in range(MICRO)]
            if vertical:
                losses += [float(one) for one in schedule.step([(one, one["input_ids"]) for one in batches])]
            for number, one in enumerate(() if vertical else batches):
                with nullcontext() if number == MICRO - 1 else zeroshard.no_sync(model):
                    loss = _loss(model(**one, use_cache=False).logits, one["input_ids"])
                    (loss / MICRO).backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        values = {name: one.clone() for name, one in zeroshard.iterate_full_parameters(model)}
        found.append((losses, values))
        zeroshard.close(model)
    assert found[1][0] == found[0][0]
    assert all(torch.equal(one, found[0][1][name]) for name, one in found[1][1].items())


@pytest.mark.parametrize(
    ("kind", "tied", "stage", "again", "others"),
    [
        ("Llama", True, 3, False, {}),
        ("Llama", False, 3, True, {}),
        ("Qwen3Moe", False, 1, False, EXPERTS),
        ("Gemma2", True, 3, False, {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    ],
)
def test_blocks_of_a_transformers_model_train_to_the_bits_of_the_whole(
    kind: str, tied: bool, stage: int, again: bool, others: dict[str, Any]
) -> None:
    run_ranks(2, _alike, kind, tied, stage, again, others, timeout=300)


def test_a_model_that_is_not_what_its_blocks_make_is_refused() -> None:
    with pytest.raises(PlanError, match=r"Linear brings no plan of pipeline stages"):
        pretrained_blocks(nn.Linear(2, 2))
    odd = _model("Llama", tied=False)
    forward = type(odd.model).forward
    vars(odd.model)["forward"] = lambda *a, **k: _doubled(forward(odd.model, *a, **k))
    with pytest.raises(
        PlanError, match=r"blocks one after the other give logits that differ from the whole model's by"
    ):
        pretrained_blocks(odd)

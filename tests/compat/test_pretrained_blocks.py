"""Transformers models as blocks of a vertical schedule, by the plan that these bring: the bits of the usual order."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.compat.test_pretrained_stages import EXPERTS, _doubled, _ids, _model
from tests.support.distributed import run_ranks
from zeroshard.errors import PlanError, UsageError
from zeroshard.pipeline.pretrained_blocks import pretrained_blocks
from zeroshard.pipeline.vertical_engine import VerticalCalls, VerticalEngine

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


def _config(stage: int, **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **others,
    }


def _labelled(step: int, rank: int, micro: int) -> dict[str, torch.Tensor]:
    batch = _batch(step, rank, micro)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def _by_config(rank: int, world: int, adapted: bool) -> None:
    found: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for stage, vertical in ((1, False), (1, True), (3, True)):
        model = _model("Llama", tied=True)
        if adapted:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        section = {"pipeline": {"schedule": "vertical"}} if vertical else {}
        engine, *_ = zeroshard.initialize(model=model, config=_config(stage, **section))
        losses: list[float] = []
        for step in range(3):
            batches = [_labelled(step, rank, micro) for micro in range(MICRO)]
            if vertical:
                assert isinstance(engine, VerticalEngine)
                losses.append(float(engine.train_batch(iter(batches))))
                continue
            engine.train()
            mean = torch.zeros(())
            for one in batches:
                loss = engine(**one, use_cache=False).loss
                engine.backward(loss)
                engine.step()
                mean += loss.detach() / MICRO / world
            dist.all_reduce(mean)
            losses.append(float(mean))
        engine.eval()
        with torch.no_grad():
            losses.append(float(engine(**_labelled(9, 0, 0), use_cache=False).loss))
        assert (engine.global_steps, engine.micro_steps) == (3, 3 * MICRO)
        found.append((losses, {name: one.clone() for name, one in zeroshard.full_state_dict(engine.module).items()}))
        engine.destroy()
    for losses, values in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-6)
        assert all(torch.equal(one, found[0][1][name]) for name, one in values.items())


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "LoRA"])
def test_train_batch_of_a_config_has_the_bits_of_a_loop_of_backwards_with_the_models_own_loss(adapted: bool) -> None:
    run_ranks(2, _by_config, adapted, timeout=300)


def _refused(rank: int, world: int) -> None:
    engine, *_ = zeroshard.initialize(
        model=_model("Llama", tied=False), config=_config(2, pipeline={"schedule": "vertical"})
    )
    assert isinstance(engine, VerticalEngine)
    with pytest.raises(UsageError, match=r"engine\.backward\(\): .* call train_batch\(data_iter\)"):
        engine.backward(engine(**_labelled(0, 0, 0)).loss)
    with pytest.raises(UsageError, match=r"dicts with input_ids, labels .* one with \['attention_mask', 'input_ids'\]"):
        engine.train_batch(iter([_batch(0, 0, 0)] * MICRO))
    with pytest.raises(UsageError, match=r"num_items_in_batch divides losses"):
        engine.train_batch(iter([{**_labelled(0, 0, 0), "num_items_in_batch": 3}] * MICRO))
    with pytest.raises(UsageError, match=r"ended after 2 of the 3 micro-batches"):
        engine.train_batch(iter([_labelled(0, 0, 0)] * 2))
    engine.set_dataloader([_labelled(0, 0, 0)])
    engine.train_batch()
    assert engine.global_steps == 1
    engine.destroy()


def test_what_an_engine_in_the_vertical_order_cannot_do_is_refused_by_name() -> None:
    run_ranks(1, _refused)


def _under_deepspeeds_name(rank: int, world: int) -> None:
    import deepspeed

    losses: list[list[float]] = []
    for initialize in (zeroshard.initialize, deepspeed.initialize):
        config = _config(3, pipeline={"schedule": "vertical"}, bf16={"enabled": True})
        engine, *_ = initialize(model=_model("Llama", tied=False), config=config)
        assert isinstance(engine, VerticalCalls)
        assert isinstance(engine, deepspeed.DeepSpeedEngine) == (initialize is deepspeed.initialize)
        engine.set_dataloader([_labelled(0, rank, micro) for micro in range(MICRO)])
        losses.append([float(engine.train_batch()) for _ in range(3)])
        engine.destroy()
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]


def test_deepspeeds_initialize_has_the_same_train_batch() -> None:
    run_ranks(2, _under_deepspeeds_name)

"""A Hugging Face model: tied weights, its own output classes, its own checkpointing, reentrant and not."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.support.cases import ALL_CASES, sample
from tests.support.distributed import run_ranks
from tests.support.installed import need
from tests.support.models import Batch, Task
from tests.support.training import Setting, assert_same, train_reference, train_sharded

need("transformers")


def _build(reentrant: bool | None, lora: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 97, "n_positions": 12, "n_embd": 16, "n_layer": 3, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    if lora:
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("ln_" in name or "mlp.c_proj" in name)
    return model.train()


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens = batch.tokens(2, 9, 97)
    output = model(input_ids=tokens, labels=tokens)
    assert output.logits.shape == (2, 9, 97)
    return output.loss


def _compare(rank: int, world: int) -> None:
    cases = [(None, False), (None, True), (False, True), (False, False), (True, False), (True, True)]
    for reentrant, lora in sample(cases):
        task = Task(partial(_build, reentrant, lora), _loss)
        setting = Setting(steps=2)
        reference = train_reference(task, setting, world, rank)
        for stage in (0, 2, 3) if ALL_CASES else (2, 3):
            what = f"stage {stage}, reentrant {reentrant}, partly frozen {lora}"
            assert_same(train_sharded(task, setting.at(stage), rank).parameters, reference.parameters, what)


def test_gpt2_trains_as_unsharded_bit_for_bit() -> None:
    run_ranks(2, _compare)

"""Adapters of peft beside LoRA, at stages 0 to 3 against one process, and merged: `ZEROSHARD_HF_TESTS=1`.

With `-s` each prints a line: the largest gap of any loss to one process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compat import tiny
from tests.support.distributed import run_ranks
from tests.support.installed import need

need("transformers", "peft")
pytestmark = [
    pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1"),
    pytest.mark.timeout(900),
]
STEPS = 3
LINEAR = ["q_proj", "v_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _lora(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, init_lora_weights=False, **{"target_modules": LINEAR, **options})


def _lycoris(kind: str) -> Any:
    import peft

    return getattr(peft, kind)(r=4, target_modules=LINEAR, init_weights=False)


METHODS: dict[str, tuple[str, Callable[[], Any]]] = {
    "LoRA": ("llama", _lora),
    "DoRA": ("llama", lambda: _lora(use_dora=True)),
    "LoHa": ("llama", lambda: _lycoris("LoHaConfig")),
    "LoKr": ("llama", lambda: _lycoris("LoKrConfig")),
    "target_parameters": ("llama", lambda: _lora(target_modules=[], target_parameters=["q_proj.weight"])),
    "fused experts": ("moe", lambda: _lora(target_modules=["q_proj"], target_parameters=EXPERTS)),
}


def _base(kind: str) -> Any:
    if kind == "llama":
        return tiny.model("llama")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        experts_implementation="eager",
    )
    return Qwen3MoeForCausalLM(config)


def _adapted(method: str) -> Any:
    from peft import get_peft_model

    kind, config = METHODS[method]
    model = _base(kind)
    torch.manual_seed(3)
    model = get_peft_model(model, config())
    with torch.no_grad():  # the defaults start far from what trains well
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.mul_(0.3)
    return model


def _batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 120, (2, 12), generator=torch.Generator().manual_seed(100 * step + rank))
    return {"input_ids": tokens, "labels": tokens}


def _alone(method: str, world: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of rank 0's batches in one process that sees all batches, and the merged weights."""
    model = _adapted(method)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    losses: list[float] = []
    for step in range(STEPS):
        found = [model(**_batch(step, rank)).loss for rank in range(world)]
        torch.stack(found).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found[0].detach()))
    return losses, {name: value.detach().clone() for name, value in model.merge_and_unload().named_parameters()}


def _config(stage: int) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    return {**given, "optimizer": optimizer, "zero_optimization": zero}


def _trains(rank: int, world: int, method: str) -> float:
    import zeroshard
    from zeroshard.errors import ZeroShardError

    warnings.simplefilter("ignore")
    expected, merged = _alone(method, world)
    gap = 0.0
    for stage in range(4):
        model = _adapted(method)
        engine, *_ = zeroshard.initialize(model=model, config=_config(stage))
        for step in range(STEPS):
            loss = engine(**_batch(step, rank)).loss
            engine.backward(loss)
            engine.step()
            if rank == 0:
                gap = max(gap, abs(float(loss.detach()) - expected[step]))
        if stage == 3:
            with pytest.raises(ZeroShardError, match="GatheredParameters"):
                model.merge_and_unload()
        with zeroshard.GatheredParameters(list(model.parameters()), modifier_rank=0):
            found = {name: value.detach().clone() for name, value in model.merge_and_unload().named_parameters()}
        assert found.keys() == merged.keys()
        for name, value in merged.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)
        engine.destroy()
    return gap


@pytest.mark.parametrize("method", list(METHODS))
def test_adapters_train_and_merge_as_in_one_process(method: str) -> None:
    gap = max(run_ranks(2, _trains, method, timeout=600))
    print(f"{method}: {gap:.1e}")
    assert gap < 1e-5

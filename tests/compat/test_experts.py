"""Expert parallelism of transformers models, which are taken as they are, through the config of DeepSpeed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.compat import tiny
from tests.support.distributed import run_ranks
from zeroshard.errors import PlanError

pytestmark = pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "expert_parallel": {"enabled": True, "autoep_size": 2},
}
SIZES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
}


def _model(kind: str, implementation: str, uneven: bool, vocab_size: int = 64) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2 if kind != "DeepseekV3" else 4,
        tie_word_embeddings=False,
        experts_implementation=implementation,
        **SIZES[kind],
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if uneven:  # all tokens choose the same experts, so that half of the ranks get none
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                nn.init.zeros_(module.weight)
    return model


def _ids(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: Any, ids: torch.Tensor, auxiliary: bool) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, **({"output_router_logits": True} if auxiliary else {})).loss


def _trained(rank: int, world: int, kind: str, implementation: str) -> None:
    auxiliary = kind in ("Mixtral", "Qwen3Moe")
    for stage, uneven in ((1, False), (3, True)):
        plain = _model(kind, implementation, uneven)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        engine, *_ = zeroshard.initialize(model=_model(kind, implementation, uneven), config=config)
        for step in range(3):
            wanted = torch.stack([_loss(plain, _ids(step, other), auxiliary) for other in range(world)]).mean()
            wanted.backward()
            norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            found = _loss(engine, _ids(step, rank), auxiliary)
            engine.backward(found)
            engine.step()
            mean = found.detach().clone()
            dist.all_reduce(mean)
            assert abs(float(mean) / world - float(wanted.detach())) < 1e-5, (kind, stage, step)
            found_norm = engine.get_global_grad_norm()
            assert found_norm is not None
            assert abs(found_norm - norm) < 1e-5, (kind, stage, step)
        state = zeroshard.full_state_dict(engine.module)
        whole = plain.state_dict()
        differing = {name: float((value - whole[name]).abs().max()) for name, value in state.items()}
        assert all(value < 1e-5 for value in differing.values()), differing
        engine.destroy()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("kind", SIZES)
def test_a_transformers_model_s_experts_are_divided(kind: str, implementation: str) -> None:
    run_ranks(2, _trained, kind, implementation, timeout=300)


def _beside_tensors(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_shard", "ep", "tp"))
    for kind, stage in (("Mixtral", 1), ("Mixtral", 3), ("Qwen3Moe", 2)):
        plain = _model(kind, "eager", False)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        config = {**CONFIG, "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": stage}}
        engine, *_ = zeroshard.initialize(model=_model(kind, "eager", False), config=config, mesh_param=mesh)
        for step in range(3):
            wanted = torch.stack([_loss(plain, _ids(step, reader), False) for reader in range(2)]).mean()
            wanted.backward()
            norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            found = _loss(engine, _ids(step, mesh.get_local_rank("ep")), False)
            engine.backward(found)
            engine.step()
            mean = found.detach().clone()
            dist.all_reduce(mean)
            assert abs(float(mean) / world - float(wanted.detach())) < 1e-5, (kind, stage, step)
            assert abs((engine.get_global_grad_norm() or 0.0) - norm) < 1e-5, (kind, stage, step)
        state, whole = zeroshard.full_state_dict(engine.module), plain.state_dict()
        assert all(float((value - whole[name]).abs().max()) < 1e-5 for name, value in state.items()), (kind, stage)
        engine.destroy()
    both = {**CONFIG, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(PlanError, match=r"autotp_size 2 beside expert_parallel.autoep_size 2: say how their ranks"):
        zeroshard.initialize(model=_model("Mixtral", "eager", False), config=both)
    other = {**both, "tensor_parallel": {"autotp_size": 4}}
    with pytest.raises(PlanError, match=r"autotp_size is 4, but the mesh .* has 2 ranks of 'tp'"):
        zeroshard.initialize(model=_model("Mixtral", "eager", False), config=other, mesh_param=mesh)


def test_experts_are_divided_beside_tensors() -> None:
    run_ranks(4, _beside_tensors, timeout=300)


def _pretrained(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def _by_trainer(rank: int, world: int, base: str) -> None:
    start = tiny.shared_folder(base, "start")
    if rank == 0:
        _model("Mixtral", "eager", uneven=False, vocab_size=128).save_pretrained(start)
    dist.barrier()
    plain = tiny.trainer(tiny.arguments(tiny.shared_folder(base, "ddp"), None, {}), _pretrained(start))
    plain.train()
    expected = tiny.logged(plain)
    tiny.forget()
    config = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    arguments = tiny.arguments(tiny.shared_folder(base, "zero"), 3, config)
    run = tiny.trainer(arguments, _pretrained(start))
    run.train()
    assert tiny.logged(run).largest_gap(expected) < 2e-5
    run.save_model(str(tiny.shared_folder(base, "model")))
    run.model_wrapped.destroy()
    tiny.forget()
    dist.barrier()
    saved, whole = _pretrained(Path(base, "model")).state_dict(), plain.model.state_dict()
    assert all(torch.allclose(value, saved[name], atol=1e-5) for name, value in whole.items())


def test_trainer_divides_the_experts_of_a_model_that_it_has_loaded_shard_by_shard(tmp_path: Path) -> None:
    run_ranks(2, _by_trainer, str(tmp_path), timeout=300)

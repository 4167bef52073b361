"""Tensor parallelism of transformers models by their own plans, through the config of DeepSpeed."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.compat import tiny
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
from zeroshard.sharding.sharded_init import ShardedInit

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


def _trained(rank: int, world: int, kind: str, stage: int, shared: bool) -> None:
    plain = _model(kind)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    with ShardedInit() if shared else nullcontext():  # what deepspeed.zero.Init leaves behind
        model = _model(kind)
    engine, *_ = zeroshard.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": stage}})
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


@pytest.mark.parametrize(
    ("kind", "stage", "shared"), [("Llama", 1, False), ("Llama", 3, True), ("Qwen3", 1, True), ("Qwen3", 3, False)]
)
def test_a_transformers_model_is_divided_by_its_own_plan(kind: str, stage: int, shared: bool) -> None:
    run_ranks(2, _trained, kind, stage, shared)


def _by_trainer(rank: int, world: int, base: str, stage: int) -> tiny.Run:
    """A script for Trainer, whose config divides the model by its plan."""
    if world == 1:
        tiny.model("llama").save_pretrained(tiny.shared_folder(base, "start"))
    folder = tiny.shared_folder(base, f"run{world}-{stage}")
    model = tiny.pretrained(base, divided=False)  # before a config at stage 3 is live, under which transformers can't
    config = {"tensor_parallel": {"autotp_size": world}}
    arguments = tiny.arguments(
        folder,
        stage if world > 1 else None,
        config,
        adam_epsilon=1e-6,
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=2,
    )
    run = tiny.trainer(arguments, model)
    run.train()
    found = tiny.logged(run)
    run.save_model(str(tiny.shared_folder(base, f"model{world}-{stage}")))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_trainer_divides_a_model_by_its_plan_and_trains_as_one_process_does(stage: int, tmp_path: Path) -> None:
    base = str(tmp_path)
    wanted = run_ranks(1, _by_trainer, base, stage)[0]
    for found in run_ranks(2, _by_trainer, base, stage):
        assert found.largest_gap(wanted) < 2e-5
    saved, whole = (tiny.saved_weights(tmp_path / f"model{world}-{stage}") for world in (2, 1))
    assert saved.keys() == whole.keys()
    assert all(torch.allclose(value, saved[name], atol=1e-5) for name, value in whole.items())


def _by_accelerate(rank: int, world: int, base: str) -> list[float]:
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs, ParallelismConfig

    if world == 1:
        tiny.model("llama").save_pretrained(tiny.shared_folder(base, "start"))
    model = tiny.pretrained(base, divided=world > 1)
    options: dict[str, Any] = {}
    if world > 1:
        config = tiny.ds_config(2, train_micro_batch_size_per_gpu=2, gradient_clipping=1.0)
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        options = {"deepspeed_plugin": plugin, "parallelism_config": ParallelismConfig(tp_size=world)}
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **options)
    rows = torch.randint(0, 96, (8, 12), generator=torch.Generator().manual_seed(3))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert len(loader) == 4  # the ranks of the axis read the same
    return tiny.accelerate_loop(accelerator, model, optimizer, loader)


def test_an_accelerate_script_with_tp_size_trains_as_one_process_does(tmp_path: Path) -> None:
    wanted = run_ranks(1, _by_accelerate, str(tmp_path))[0]
    for found in run_ranks(2, _by_accelerate, str(tmp_path)):
        assert found == pytest.approx(wanted, abs=2e-5)


def _refused(rank: int, world: int) -> None:
    with pytest.raises(PlanError, match="num_key_value_heads is 1, which 2 ranks do not divide"):
        zeroshard.initialize(model=_model("Llama", heads=2), config=CONFIG)


def test_heads_that_do_not_divide_are_refused() -> None:
    run_ranks(2, _refused)


def _opt() -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return OPTForCausalLM(
        OPTConfig(vocab_size=64, word_embed_proj_dim=32, max_position_embeddings=32, dropout=0.0, **sizes)
    )


def _phi3() -> Any:
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Phi3ForCausalLM(Phi3Config(vocab_size=64, num_key_value_heads=2, pad_token_id=0, **sizes))


def _named(columns: str, rows: str) -> dict[str, Any]:
    specs = [{"patterns": [columns], "partition_type": "column"}, {"patterns": [rows], "partition_type": "row"}]
    return {**CONFIG, "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": specs}}}


ATTENTION = _named(r".*\.(q|k|v)_proj\.weight", r".*\.(o|out)_proj\.weight")
NAMED: list[tuple[Any, Any, str]] = [
    (_opt, ATTENTION, r"'model.decoder.layers.0.self_attn' over 2 ranks can't compute"),
    (
        lambda: _model("Qwen3"),
        ATTENTION,
        r"gradient of 'model.layers.0.self_attn.q_norm' has to be summed over the ranks",
    ),
    (lambda: _model("Llama"), _named(r".*\.q_proj\.weight", "nothing"), r"'the model' over 2 ranks can't compute"),
    (
        lambda: _model("Mixtral"),
        _named(r".*\.mlp\.gate\.weight", r".*\.o_proj\.weight"),
        r"tensor_parallel.partition_config names 'model.layers.0.mlp.gate'",
    ),
]


def _wrongly_named(rank: int, world: int) -> None:
    for make, config, said in NAMED:
        with pytest.raises(PlanError, match=said):
            zeroshard.initialize(model=make(), config=config)


def test_layers_whose_division_would_change_what_a_model_computes_are_refused_at_start() -> None:
    run_ranks(2, _wrongly_named)


def _rightly_named(rank: int, world: int) -> None:
    """As the models' own plans say it: a fused layer whose output is gathered; and the layers of an MLP alone."""
    fused = _named(r".*\.(qkv|gate_up)_proj\.weight", r".*\.(o|down)_proj\.weight")
    for make, config in ((_phi3, fused), (_opt, _named(r".*\.fc1\.weight", r".*\.fc2\.weight"))):
        plain, model = make(), make()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        engine, *_ = zeroshard.initialize(model=model, config=config)
        assert model.training
        for step in range(2):
            wanted = plain(input_ids=_ids(step), labels=_ids(step)).loss
            wanted.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found = engine(input_ids=_ids(step), labels=_ids(step)).loss
            engine.backward(found)
            engine.step()
            assert abs(float(found) - float(wanted)) < 2e-6


def test_layers_that_can_be_divided_train_as_in_one_process() -> None:
    run_ranks(2, _rightly_named)


def _drawn(rank: int) -> Any:
    """A model whose values another rank draws in another way."""
    model, generator = _model("Llama"), torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=generator)
    return model


def _without_a_seed(rank: int, world: int) -> None:
    for named in ({}, _named(r".*\.(q|k|v|gate|up)_proj\.weight", r".*\.(o|down)_proj\.weight")):
        engine, *_ = zeroshard.initialize(model=_drawn(rank), config={**CONFIG, **named})
        found = zeroshard.full_state_dict(engine.module)  # empty on the other ranks
        wanted = dict(_drawn(0).named_parameters())
        assert rank or all(torch.equal(found[name], value) for name, value in wanted.items())
        engine.destroy()


def test_a_model_that_ranks_built_without_a_seed_is_rank_0s() -> None:
    run_ranks(2, _without_a_seed)

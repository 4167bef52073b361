"""Products in fp8 beside what else an engine does: accumulation, checkpointing, frozen weights, state on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrizations

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.fp8_model import BY_BLOCK, FP8, LAYERS, adamw, batch, build, graphs_of_blocks, loss_of, recipe, train
from zeroshard.config import load_config
from zeroshard.errors import ConfigError, PlanError
from zeroshard.fp8.convert import choose
from zeroshard.fp8.linear import Fp8Linear
from zeroshard.fp8.recipe import Fp8, Scaling
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.offload import Offload
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import HostUpdate

Trained = tuple[list[float], dict[str, torch.Tensor]]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    "fp8": {"enabled": True, "filter": ["blocks"]},
}


def _close(ours: Trained, theirs: Trained, *, loss: float, weight: float) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=loss, abs=loss)
    for name, value in theirs[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=0, atol=weight)


def _checkpointed(model: nn.Module) -> None:
    zeroshard.checkpoint_activations(model)


def _ways(rank: int, world: int) -> None:
    plain = train(rank, 3, 3, micro=2)
    recomputed = train(rank, 3, 3, micro=2, wrap=_checkpointed)
    assert recomputed[0] == plain[0]
    for name, value in plain[1].items():
        assert torch.equal(recomputed[1][name], value), name
    cast_in_forwards = train(rank, 3, 3, micro=2, fp8=replace(FP8, shards=False))
    blocks = train(rank, 3, 3, micro=2, fp8=BY_BLOCK)
    again = train(rank, 3, 3, micro=2, fp8=BY_BLOCK, wrap=_checkpointed)
    assert again[0] == blocks[0]
    assert all(torch.equal(again[1][name], value) for name, value in blocks[1].items())
    _close(train(rank, 3, 3, micro=2, fp8=replace(BY_BLOCK, shards=False)), blocks, loss=0.02, weight=0.02)
    by_row = train(rank, 3, 3, micro=2, fp8=replace(FP8, scaling=Scaling.ROWWISE))
    in_bf16 = train(rank, 3, 3, micro=2, fp8=None)
    for other in (cast_in_forwards, by_row, in_bf16):
        _close(other, plain, loss=0.02, weight=0.02)
    assert in_bf16[0] != plain[0]


def test_accumulation_checkpointing_and_other_scales_train_alike() -> None:
    run_ranks(2, _ways)


def _from_config(rank: int, world: int, stage: int, fp8: Fp8) -> Trained:
    config = {**CONFIG, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    config["fp8"] = {**CONFIG["fp8"], "recipe": fp8.scaling.value}
    engine, *_ = zeroshard.initialize(model=build(fp8), config=config)
    losses: list[float] = []
    for step in range(3):
        loss = engine(batch(step, 0, rank)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    module = engine.module
    assert isinstance(module.get_submodule(LAYERS[0]), Fp8Linear)
    return losses, dict(zeroshard.iterate_full_parameters(module))


@pytest.mark.parametrize("fp8", [FP8, BY_BLOCK], ids=["by tensor", "by block"])
def test_a_config_trains_as_the_recipe_does(fp8: Fp8) -> None:
    found = run_ranks(2, _from_config, 3, fp8)[0]
    other = run_ranks(2, _from_config, 1, fp8)[0]
    assert found[0] == other[0]
    for name, value in found[1].items():
        assert torch.equal(other[1][name], value), name


def _frozen(rank: int, world: int) -> Plan:
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "head" in name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = zeroshard.shard(model, adamw(trained), plan=recipe(3))
    assert optimizer is not None
    first = loss_of(model, batch(0, 0, rank))
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert float(loss_of(model, batch(0, 0, rank))) < float(first)
    return zeroshard.plan_of(model)


def test_frozen_weights_multiply_in_fp8_and_keep_their_precision() -> None:
    plan = run_ranks(2, _frozen)[0]
    assert plan.policy.products is not None
    assert set(plan.policy.products.layers) == set(LAYERS)
    assert not any(group.scaled for _, group in plan.groups())


def _away(rank: int, world: int) -> Trained:
    model = build()
    away = replace(recipe(3), offload=Offload(update=HostUpdate.PROCESSOR))
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=away)
    assert optimizer is not None
    assert not any(group.scaled for _, group in zeroshard.plan_of(model).groups())
    losses: list[float] = []
    for step in range(3):
        loss = loss_of(model, batch(step, 0, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, dict(zeroshard.iterate_full_parameters(model))


def _at_home(rank: int, world: int) -> Trained:
    return train(rank, 3, 3, fp8=replace(FP8, shards=False))


def test_state_in_host_memory_trains_with_weights_that_are_cast_in_forwards() -> None:
    _close(run_ranks(2, _away)[0], run_ranks(2, _at_home)[0], loss=1e-6, weight=1e-6)


def _normalized(rank: int, world: int) -> None:
    """Each forward computes the weight of a layer of other parameters."""

    def normalize(model: nn.Module) -> None:
        parametrizations.weight_norm(model.get_submodule(LAYERS[0]))

    whole = train(rank, 0, 3, wrap=normalize)
    _close(train(rank, 3, 3, wrap=normalize), whole, loss=0, weight=0)
    _close(train(rank, 3, 3, fp8=None, wrap=normalize), whole, loss=0.02, weight=0.02)


def test_a_layer_whose_weight_is_parametrized_computes_in_fp8_at_stage_3_too() -> None:
    run_ranks(2, _normalized)


def _stops_at_nan(rank: int, world: int) -> None:
    model = build()
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(3))
    assert optimizer is not None
    before = dict(zeroshard.iterate_full_parameters(model))
    bad = batch(0, 0, rank)
    bad[0, 0] = float("inf")
    loss_of(model, bad).backward()
    with pytest.raises(zeroshard.errors.NonFiniteError):
        optimizer.step()
    for name, value in zeroshard.iterate_full_parameters(model):
        assert torch.equal(value, before[name])


def test_an_input_that_is_not_finite_ends_in_a_step_that_is_not_taken() -> None:
    run_ranks(1, _stops_at_nan)


def _compiled(rank: int, world: int, scaling: Scaling) -> None:
    plain = train(rank, 3, 2, fp8=replace(FP8, scaling=scaling))
    graphs: list[torch.fx.GraphModule] = []

    def compiled(model: nn.Module) -> None:
        nonlocal graphs
        graphs = graphs_of_blocks(model)

    assert train(rank, 3, 2, fp8=replace(FP8, scaling=scaling), wrap=compiled)[0] == plain[0]
    assert len(graphs) == 1


@pytest.mark.parametrize("scaling", Scaling)
def test_compiled_blocks_that_are_alike_share_one_graph(scaling: Scaling) -> None:
    run_ranks(1, _compiled, scaling)


def _compiled_whole(rank: int, world: int) -> None:
    for stage in (2, 3):
        plain = train(rank, stage, 2, micro=2)
        torch._dynamo.reset()
        counters.clear()
        whole = train(rank, stage, 2, micro=2, wrap=lambda model: model.compile(backend="aot_eager"))
        assert not counters["graph_break"]
        assert stage == 3 or counters["stats"]["unique_graphs"] == 1  # graphs end at units that are sharded
        assert whole[0] == plain[0]
        for name, value in plain[1].items():
            assert torch.equal(whole[1][name], value), (stage, name)


def test_a_model_compiled_as_a_whole_multiplies_in_fp8_with_equal_bits() -> None:
    run_ranks(2, _compiled_whole)


def test_models_in_float32_and_edited_plans_are_refused() -> None:
    model = build()
    with pytest.raises(PlanError, match="computes in float32"):
        zeroshard.shard(model, adamw(model.parameters()), plan=Recipe(precision=Precision(matmul=Fp8())))
    with pytest.raises(ConfigError, match=r"fp8\.enabled.*bf16\.enabled"):
        load_config({**CONFIG, "bf16": {"enabled": False}}, world_size=1)
    with pytest.raises(ConfigError, match=r"fp8\.recipe.*'mxfp8' is refused"):
        load_config({**CONFIG, "fp8": {"enabled": True, "recipe": "mxfp8"}}, world_size=1)


def _taken(width: int, tokens: int, depth: int = 24) -> dict[str, bool]:
    """Which of a block's layers, of `width` squared and four times as wide, are converted by themselves."""
    with torch.device("meta"):
        blocks = nn.ModuleList(
            nn.ModuleDict({"square": nn.Linear(width, width), "wide": nn.Linear(width, 4 * width)})
            for _ in range(depth)
        )
    found = choose(nn.ModuleDict({"blocks": blocks}), Fp8(tokens=tokens))
    return {name: any(choice.taken for choice in found if choice.name.endswith(name)) for name in ("square", "wide")}


def test_only_layers_that_take_the_gpu_longer_than_fp8_takes_the_host_are_converted_by_themselves() -> None:
    assert _taken(256, 8192) == {"square": False, "wide": False}
    assert _taken(1024, 4096) == {"square": False, "wide": False}
    assert _taken(1536, 8192) == {"square": False, "wide": False}
    assert _taken(1536, 16384) == {"square": True, "wide": True}
    assert _taken(2048, 8192) == {"square": True, "wide": True}


def test_a_model_that_is_as_slow_as_its_host_stays_in_bf16_but_for_layers_that_are_named() -> None:
    assert _taken(1536, 8192, depth=48) == {"square": False, "wide": False}
    assert _taken(2048, 8192, depth=9) == {"square": False, "wide": False}
    assert _taken(4096, 8192, depth=3) == {"square": True, "wide": True}
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.ModuleDict({"wide": nn.Linear(1536, 6144)}) for _ in range(2))
    found = choose(nn.ModuleDict({"blocks": blocks}), Fp8(tokens=8192, names=("auto", "blocks.1.wide")))
    assert [choice.taken for choice in found] == [False, True]
    assert "15 ms" in found[0].why


def test_a_deep_model_whose_blocks_wait_for_the_host_says_for_how_long() -> None:
    with torch.device("meta"):
        blocks = nn.ModuleList(
            nn.ModuleDict({"small": nn.Linear(256, 256), "wide": nn.Linear(1536, 8960)}) for _ in range(24)
        )
    found = choose(nn.ModuleDict({"blocks": blocks}), Fp8(tokens=8192))
    assert not any(choice.taken for choice in found)
    assert "take 23.5 ms of a step, and the host takes about 26.4 ms for the 48 layers" in found[1].why

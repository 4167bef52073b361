"""Leaf modules and external parameters decide where units end; a tiled layer, modules on another device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, Task
from tests.support.training import Setting, assert_close, assert_same, build, shard_task, train_reference, train_sharded
from zeroshard.config import load_config
from zeroshard.errors import ConfigError, PlanError, UsageError
from zeroshard.sharding.on_device import OnDevice
from zeroshard.sharding.tiled import TiledLinear, TiledLinearReturnBias
from zeroshard.sharding.units import find_units

WIDTH, VOCABULARY = 8, 2100


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.members = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.gate(x).softmax(-1)
        return sum((weight[..., i : i + 1] * member(x) for i, member in enumerate(self.members)), x)


class _Head(nn.Module):
    """Reads the embedding's weight, which it does not own."""

    def __init__(self, embedding: nn.Embedding, *, register: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.__dict__["embedding"] = embedding
        if register:
            zeroshard.register_external_parameter(self, embedding.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x), self.__dict__["embedding"].weight)


class _Language(nn.Module):
    def __init__(self, *, register: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = _Experts()
        self.head = _Head(self.embedding, register=register)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.experts(self.embedding(tokens)))


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens = batch.normal(3, 5).abs().mul(500).long().remainder(VOCABULARY)
    return model(tokens).square().mean()


TASK = Task(_Language, _loss)
UNREGISTERED = Task(lambda: _Language(register=False), _loss)


def units(model: nn.Module) -> list[str]:
    return [unit.name for unit in find_units(model)]


def test_a_leaf_is_one_unit_and_without_the_mark_its_parts_are() -> None:
    model = _Language(register=False)
    assert units(model) == ["", "embedding", "experts.members.0", "experts.members.1"]
    assert zeroshard.set_z3_leaf_modules(model, [_Experts]) == [model.experts]
    assert zeroshard.z3_leaf_module(model.experts)
    assert zeroshard.get_z3_leaf_modules(model) == [model.experts]
    assert units(model) == ["", "embedding", "experts"]
    assert zeroshard.unset_z3_leaf_modules(model, ["_Experts"]) == [model.experts]
    assert units(model) == ["", "embedding", "experts.members.0", "experts.members.1"]
    zeroshard.set_z3_leaf_module(model, True)
    assert units(model) == [""]
    assert units(copy.deepcopy(model)) == [""]


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)
        return x


def test_leaves_are_named_by_path_and_by_the_end_of_it() -> None:
    model = _Language()
    assert zeroshard.set_z3_leaf_modules_by_name(model, ["experts", "x"], raise_if_not_found=False) == (
        [model.experts],
        ["x"],
    )
    assert zeroshard.set_z3_leaf_modules_by_suffix(model, ["norm"]) == ([model.head.norm], [])
    assert "head.norm" in units(model)
    with pytest.raises(UsageError, match="no module 'x'"):
        zeroshard.set_z3_leaf_modules_by_name(model, ["x"])
    with pytest.raises(UsageError, match="no module 'Conv2d'"):
        zeroshard.set_z3_leaf_modules(model, [nn.Conv2d])


def test_a_marked_list_of_modules_is_gathered_with_the_module_that_holds_it() -> None:
    tower = _Tower()
    assert units(tower) == ["", "linears.0", "linears.1", "linears.2"]
    zeroshard.set_z3_leaf_modules_by_suffix(tower, ["linears"])
    assert units(tower) == [""]
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    expected = tower(x)
    model, _ = zeroshard.shard(tower, plan=3)
    assert torch.equal(model(x), expected)
    zeroshard.close(model)


def test_the_config_names_leaves() -> None:
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "leaf_module": {"names": ["experts"]}}}
    assert load_config(config, world_size=1).zero.leaf_modules.names == ("experts",)
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    engine, *_ = zeroshard.initialize(model=_Language(), config={**config, "optimizer": optimizer})
    assert [unit.name for unit in engine.plan.units] == ["", "experts"]
    engine.destroy()
    for key in ("names", "name_suffixes", "classes"):
        config["zero_optimization"]["leaf_module"] = {key: ["nowhere"]}  # type: ignore[index]
        with pytest.raises(ConfigError, match=rf"leaf_module\.{key}: the model has no module .*nowhere"):
            zeroshard.initialize(model=_Language(), config={**config, "optimizer": optimizer})


def _trains(rank: int, world: int) -> None:
    reference = train_reference(TASK, Setting(), world).parameters
    for stage in (2, 3):
        assert_close(train_sharded(TASK, Setting(plan=stage), rank).parameters, reference, 2e-6)
        assert_close(train_sharded(UNREGISTERED, Setting(plan=stage), rank).parameters, reference, 2e-6)


def test_an_external_parameter_is_there_when_the_other_module_reads_it() -> None:
    assert "embedding" not in units(_Language())
    run_ranks(2, _trains)


def test_registering_late_or_for_another_model_is_refused() -> None:
    model = _Language(register=False)
    weight = model.embedding.weight
    with pytest.raises(UsageError, match="not registered as external"):
        zeroshard.unregister_external_parameter(model.head, weight)
    zeroshard.register_external_parameter(model.head, weight)
    zeroshard.unregister_external_parameter(model.head, weight)
    assert "embedding" in units(model)
    zeroshard.register_external_parameter(model.head, nn.Parameter(torch.ones(1)))
    with pytest.raises(PlanError, match="'head' registered an external parameter that the model does not have"):
        find_units(model)
    sharded, _ = shard_task(UNREGISTERED, Setting())
    assert isinstance(sharded, _Language)
    zeroshard.register_external_parameter(sharded.head, sharded.embedding.weight)  # late, and no less obeyed
    zeroshard.register_external_parameter(sharded.embedding, sharded.embedding.weight)
    zeroshard.close(sharded)


@pytest.mark.parametrize(("rows", "columns", "bias"), [(1, 1, True), (2, 3, True), (3, 2, False), (8, 7, True)])
def test_a_tiled_layer_computes_what_the_whole_one_does(rows: int, columns: int, bias: bool) -> None:
    whole = nn.Linear(8, 7, bias=bias)
    tiled = TiledLinear(8, 7, bias, rows, columns, init_linear=whole)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(tiled(x), whole(x))
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in whole.parameters())
    parts = TiledLinear(8, 7, bias, rows, columns, True, False, init_linear=whole)
    outputs = parts(x.split(parts.in_sizes, dim=-1))
    assert [part.shape[-1] for part in outputs] == parts.out_sizes
    torch.testing.assert_close(torch.cat(list(outputs), -1), whole(x))


def test_tiles_have_the_names_and_bounds_of_deepspeeds() -> None:
    whole = nn.Linear(5, 7)
    tiled = TiledLinear(5, 7, in_splits=2, out_splits=3, init_linear=whole)
    assert (tiled.in_parts, tiled.out_parts) == ([0, 3, 5], [0, 3, 5, 7])
    own = dict(tiled.named_parameters())
    assert {name for name in own if name.endswith("bias")} == {f"linears.{row}.1.bias" for row in range(3)}
    for row in range(3):
        for column in range(2):
            cut = whole.weight[tiled.out_parts[row] : tiled.out_parts[row + 1]]
            cut = cut[:, tiled.in_parts[column] : tiled.in_parts[column + 1]]
            assert torch.equal(own[f"linears.{row}.{column}.weight"], cut)


class _BiasBeside(nn.Linear):
    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        return F.linear(input, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_tiles_hand_on_a_bias_that_they_do_not_add(bias: bool) -> None:
    whole, x = nn.Linear(8, 7, bias=bias), torch.randn(2, 8)
    options: dict[str, Any] = {"in_splits": 3, "out_splits": 2, "linear_cls": _BiasBeside, "init_linear": whole}
    output, beside = TiledLinearReturnBias(8, 7, bias, **options)(x)
    torch.testing.assert_close(output, F.linear(x, whole.weight))
    if bias:
        assert torch.equal(beside, whole.bias)
        outputs, biases = TiledLinearReturnBias(8, 7, bias, combine_out_splits=False, **options)(x)
        assert [part.shape[-1] for part in outputs] == [part.numel() for part in biases] == [4, 3]
    else:
        assert beside is None
    torch.testing.assert_close(TiledLinear(8, 7, bias, **options)(x), whole(x))


def test_tiles_are_units_and_wrong_layers_are_refused() -> None:
    model = nn.Sequential(TiledLinear(8, 8, in_splits=2, out_splits=2), nn.Tanh())
    assert units(model) == [""] + [f"0.linears.{i}.{j}" for i in range(2) for j in range(2)]
    with pytest.raises(UsageError, match=r"an input of shape \(2, 7\) has no 8 features"):
        TiledLinear(8, 8, in_splits=2)(torch.ones(2, 7))
    with pytest.raises(UsageError, match="in_splits 9 must be from 1 to the 8 features"):
        TiledLinear(8, 8, in_splits=9)
    with pytest.raises(UsageError, match=r"a layer of shape \(8, 4\) with bias does not fit"):
        TiledLinear(8, 8, init_linear=nn.Linear(4, 8))
    with pytest.raises(UsageError, match="needs a list of 2 tensors"):
        TiledLinear(8, 8, in_splits=2, input_is_already_split=True)(torch.ones(1, 8))


def _tiles(rank: int, world: int) -> None:
    task = Task(
        lambda: nn.Sequential(nn.Linear(WIDTH, 12), TiledLinear(12, 9, in_splits=3, out_splits=2)),
        lambda m, b: m(b.normal(3, WIDTH)).square().mean(),
    )
    reference = train_reference(task, Setting(), world).parameters
    results = [train_sharded(task, Setting(plan=stage), rank).parameters for stage in (1, 3)]
    assert_close(results[0], reference)
    assert_same(results[0], results[1])


def test_tiles_train_sharded() -> None:
    run_ranks(2, _tiles)


def test_on_device_builds_elsewhere_and_leaves_nothing_behind() -> None:
    with OnDevice(torch.bfloat16):
        meta = nn.Linear(4, 4)
    with OnDevice(torch.float16, "cpu"):
        half = nn.Linear(4, 4)
    with OnDevice(torch.float16, enabled=False):
        plain = nn.Linear(4, 4)
    with pytest.raises(ZeroDivisionError), OnDevice(torch.float64):
        raise ZeroDivisionError
    after = nn.Linear(4, 4)
    assert (meta.weight.device.type, meta.weight.dtype) == ("meta", torch.bfloat16)
    assert (half.weight.device.type, half.weight.dtype) == ("cpu", torch.float16)
    assert plain.weight.dtype is after.weight.dtype is torch.float32
    assert after.weight.device.type == "cpu"
    with pytest.raises(UsageError, match="no floating-point dtype"):
        OnDevice(torch.int8)
    assert isinstance(build(TASK), _Language)

"""Frozen weights of quantized models in other forms than one parameter: tensors made of others, buffers, second names.

The layers are those of `tests.support.quantized`; `tests/compat/test_quantized.py` has the libraries' own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import held_bytes
from tests.support.models import WIDTH, Batch
from tests.support.quantized import (
    Coded,
    CodedLinear,
    Float8Linear,
    GroupedLinear,
    HQQLinear,
    Int8Linear,
    Linear4bit,
    QuantizedStack,
    RepackedLinear,
    quantized_task,
)
from tests.support.training import adamw, build
from zeroshard.errors import UsageError
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.sharding.resting import is_resting
from zeroshard.sharding.units import find_units
from zeroshard.sharding.unowned import unowned_shard_of
from zeroshard.sharding.unpack import parameters_of

STEPS = 3
KINDS = (CodedLinear, GroupedLinear, Linear4bit, HQQLinear, Float8Linear, Int8Linear)
FROZEN = {
    CodedLinear: {"_weight_qdata": torch.int8, "_weight_scale_codes": torch.uint8, "_weight_scale_step": torch.float32},
    GroupedLinear: {"qweight": torch.int32, "zeros": torch.int32, "scales": torch.float16},
    Linear4bit: {"weight": torch.uint8, "_weight_absmax": torch.float32},
    HQQLinear: {"W_q": torch.float16, "_W_q_scale": torch.float32, "_W_q_zero": torch.float32},
    Float8Linear: {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32},
    Int8Linear: {"weight": torch.int8},
}
"""The parameters that the layers' weights are to the engine."""
Kind = type[nn.Module]
Values = dict[str, torch.Tensor]


def _plain(kind: Kind, world: int) -> tuple[Values, list[float]]:
    """Trained adapters, and losses of rank 0, of one process that sees all batches."""
    task = quantized_task(kind)
    model = build(task)
    optimizer = adamw(model)
    losses: list[float] = []
    for step in range(STEPS):
        found = [task.loss(model, Batch(step, 0, rank)) for rank in range(world)]
        torch.stack(found).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found[0].detach()))
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}, losses


def _step(model: nn.Module, optimizer: Any, rank: int, step: int) -> float:
    loss = quantized_task(CodedLinear).loss(model, Batch(step, 0, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _train(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        _step(model, optimizer, rank, step)


def _whole(model: nn.Module) -> Values:
    return {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}


def _same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bytes are the same; codes in a floating dtype may be NaN."""
    raw = [value.contiguous().view(-1).view(torch.uint8) for value in (one, other)]
    return one.dtype is other.dtype and torch.equal(*raw)


def _recipe(stage: int, **changes: Any) -> Recipe:
    return Recipe(sharding=STAGES[stage], policy=ExecutionPolicy(clip_norm=0.5), **changes)


def _trains(rank: int, world: int, kind: Kind) -> None:
    expected, losses = _plain(kind, world)
    for recipe in [*(_recipe(stage) for stage in range(4)), _recipe(3, offload=Offload(param=True))]:
        model = build(quantized_task(kind))
        before = {id(layer.base): layer.base for layer in model.blocks}  # pyright: ignore[reportGeneralTypeIssues]
        model, optimizer = zeroshard.shard(model, adamw(model), plan=recipe)
        for step in range(STEPS):
            assert _step(model, optimizer, rank, step) == pytest.approx(losses[step], rel=1e-6) or rank
        plan = zeroshard.plan_of(model)
        frozen = [group for _, group in plan.groups() if not group.trainable]
        found = {segment.name: group.param.dtype for group in frozen for segment in group.layout.segments}
        for name, dtype in FROZEN[kind].items():
            assert found[f"blocks.1.base.{name}"] == str(dtype).removeprefix("torch.")
        assert all(group.param.divided == (recipe.sharding == STAGES[3]) for group in frozen)
        assert held_bytes(model).total == state_bytes(plan).total
        trained = _whole(model)
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-6)
        zeroshard.close(model)
        assert all(id(layer.base) in before for layer in model.blocks)  # pyright: ignore[reportGeneralTypeIssues]


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_trains_as_in_one_process(kind: Kind) -> None:
    run_ranks(2, _trains, kind)


def _evaluated(rank: int, world: int) -> None:
    for stage in (0, 2, 3):
        ends: list[Values] = []
        for evaluates in (False, True):
            model = build(quantized_task(RepackedLinear))
            model, optimizer = zeroshard.shard(model, adamw(model), plan=stage)
            for step in range(STEPS):
                if evaluates:
                    model.eval()
                    with torch.no_grad():
                        quantized_task(RepackedLinear).loss(model, Batch(step, 0, rank))
                    model.train()
                _step(model, optimizer, rank, step)
            ends.append(_whole(model))
            zeroshard.close(model)
        assert _same(*ends), stage


def test_an_evaluation_between_steps_packs_no_codes_anew() -> None:
    run_ranks(2, _evaluated)


def _keeps_bits(rank: int, world: int) -> None:
    """Scales in float32 beside a model that computes in bfloat16."""
    for kind in KINDS:
        model = build(quantized_task(kind))
        planned = {name for unit in find_units(model) for name in (each.name for each in unit.parameters)}
        recipe = _recipe(3, precision=Precision(param="bf16"))
        model, optimizer = zeroshard.shard(model, adamw(model), plan=recipe)
        assert planned == {name for name, _ in model.named_parameters()}
        before = _whole(model)
        loss = model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        after = _whole(model)
        for name, dtype in FROZEN[kind].items():
            name = f"blocks.2.base.{name}"
            assert after[name].dtype is dtype
            assert _equal(after[name], before[name])
        zeroshard.close(model)


def test_no_compute_dtype_changes_codes_or_scales() -> None:
    run_ranks(2, _keeps_bits)


def _saved(rank: int, world: int, folder: Path) -> None:
    for kind in KINDS:
        model = build(quantized_task(kind))
        model, optimizer = zeroshard.shard(model, adamw(model), plan=3)
        _step(model, optimizer, rank, 0)
        zeroshard.save(model, folder, kind.__name__)
        expected = _whole(model)
        _step(model, optimizer, rank, 1)
        goes_on = _whole(model)
        zeroshard.close(model)
        for stage in (1, 3):
            other = build(quantized_task(kind))
            other, optimizer = zeroshard.shard(other, adamw(other), plan=stage)
            _step(other, optimizer, rank, 5)
            zeroshard.load(other, folder, kind.__name__)
            assert _same(_whole(other), expected)
            _step(other, optimizer, rank, 1)
            assert _same(_whole(other), goes_on)
            zeroshard.close(other)


def test_checkpoints_hold_codes_and_scales_and_load_at_another_stage(tmp_path: Path) -> None:
    run_ranks(2, _saved, tmp_path)


def _closed(rank: int, world: int) -> None:
    """A closed model is as before where its parameters are whole; another engine takes up a sharded one."""
    for kind in KINDS:
        model = build(quantized_task(kind))
        names, saved = [name for name, _ in model.named_parameters()], sorted(model.state_dict())
        losses = [float(quantized_task(kind).loss(model, Batch(0, 0, 0)).detach())]
        for stage in (1, 3, 2):
            model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.0), plan=stage)
            loss = quantized_task(kind).loss(model, Batch(0, 0, 0))
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            zeroshard.close(model)
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
        assert [name for name, _ in model.named_parameters()] == names
        assert sorted(model.state_dict()) == saved
        assert float(quantized_task(kind).loss(model, Batch(0, 0, 0)).detach()) == pytest.approx(losses[0], rel=1e-6)


def test_a_closed_model_is_as_it_was_and_can_be_sharded_again() -> None:
    run_ranks(2, _closed)


def _reads(rank: int, world: int) -> None:
    model = QuantizedStack(CodedLinear)
    layer: Any = model.blocks[1]
    expected, before = layer.base.weight.dequantize(), model.state_dict()
    model, _ = zeroshard.shard(model, adamw(model), plan=3)
    weight = layer.base.weight
    assert isinstance(weight, Coded)
    with pytest.raises(UsageError, match=r"parameter 'blocks\.1\.base\._weight_qdata' are not here"):
        weight.dequantize()
    for given in (weight, model, list(model.parameters())):
        with zeroshard.GatheredParameters(given):
            assert torch.equal(weight.dequantize(), expected)
    with zeroshard.GatheredParameters(model):
        state = model.state_dict()
    assert state.keys() == before.keys()
    assert torch.equal(state["blocks.1.base.weight"].dequantize(), expected)
    # A library merges an adapter: it takes the weight, deletes it, and sets another one.
    with zeroshard.GatheredParameters(model):
        merged = Coded.of(weight.dequantize())
        del layer.base.weight
        layer.base.weight = nn.Parameter(merged, requires_grad=False)
    zeroshard.close(model)
    assert torch.equal(layer.base.weight.dequantize(), Coded.of(expected).dequantize())


def test_a_weight_made_of_others_is_read_and_replaced_where_it_is_gathered() -> None:
    run_ranks(2, _reads)


def _loaded(rank: int, world: int) -> None:
    """Each rank keeps its share of the codes while the model is made, and trains as one process."""
    for kind in (CodedLinear, Linear4bit, Float8Linear, Int8Linear):
        expected, losses = _plain(kind, world)
        whole = _held(build(quantized_task(kind)))
        with zeroshard.QuantizedInit():
            model = build(quantized_task(kind))
        held = _held(model)
        assert held <= whole / world + 3_000
        with pytest.raises(UsageError, match=r"[Cc]all zeroshard\.initialize"):
            model(torch.ones(1, WIDTH))
        with zeroshard.GatheredParameters(model):
            assert _held(model) == whole
        for stage in (3, 1):
            model, optimizer = zeroshard.shard(model, adamw(model), plan=_recipe(stage))
            for step in range(STEPS) if stage == 3 else ():
                assert _step(model, optimizer, rank, step) == pytest.approx(losses[step], rel=1e-6) or rank
            trained = _whole(model)
            assert all(torch.allclose(trained[name], value, rtol=0, atol=1e-6) for name, value in expected.items())
            zeroshard.close(model)


def _held(model: nn.Module) -> int:
    """Bytes of the codes and scales of the model on this rank."""
    total = 0
    for parameter in model.parameters():
        for part in parameters_of(parameter) if not parameter.requires_grad else ():
            unowned = unowned_shard_of(part)
            if is_resting(part):
                assert unowned is not None
                total += unowned.values.nbytes
            else:
                total += part.nbytes
    return total


def test_codes_are_divided_while_a_model_is_loaded() -> None:
    run_ranks(2, _loaded)


class _Counts(GroupedLinear):
    """Writes on its codes in the forward, as no quantized layer does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        with torch.no_grad():
            self.qweight += 1
        return out


def _refused(rank: int, world: int) -> None:
    model = QuantizedStack(_Counts)
    model, optimizer = zeroshard.shard(model, adamw(model), plan=3)
    with pytest.raises(UsageError, match=r"'blocks\.\d\.base\.qweight'.*changed in place"):
        _train(model, optimizer, rank)
    trained = nn.Sequential(CodedLinear())
    trained[0].weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"'0\.weight' is a Coded.*requires a gradient.*Freeze it"):
        zeroshard.shard(trained, adamw(trained), plan=3)


def test_what_would_be_lost_is_refused_by_name() -> None:
    run_ranks(2, _refused)


def _kept_buffers() -> list[Callable[[], nn.Module]]:
    def table() -> nn.Module:
        made = nn.Linear(4, 4)
        made.register_buffer("index", torch.zeros(40_000, dtype=torch.int32))
        return made

    def counts() -> nn.Module:
        made = nn.Module()
        made.register_buffer("seen", torch.zeros(40_000, dtype=torch.int32))
        return made

    def positions() -> nn.Module:
        made = GroupedLinear()
        made.qweight = made.qweight.long()
        return made

    return [table, counts, positions]


@pytest.mark.parametrize("made", _kept_buffers())
def test_index_tables_counters_and_positions_stay_buffers(made: Callable[[], nn.Module]) -> None:
    planned = {parameter.name for unit in find_units(made()) for parameter in unit.parameters}
    assert planned == {name for name, _ in made().named_parameters()}


def _any_dtype(rank: int, world: int, folder: Path) -> None:
    raw = torch.arange(320, dtype=torch.uint8) % 255
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e8m0fnu):
        model = nn.Linear(4, 4)
        model.register_parameter("table", nn.Parameter(raw.view(dtype), requires_grad=False))
        model, _ = zeroshard.shard(model, torch.optim.SGD(model.parameters()), plan=_recipe(3))
        assert torch.equal(_whole(model)["table"].view(torch.uint8), raw)
        zeroshard.save(model, folder, str(dtype))
        with zeroshard.GatheredParameters(model, modifier_rank=0):
            model.table.view(torch.uint8).zero_()  # pyright: ignore[reportCallIssue]
        zeroshard.load(model, folder, str(dtype))
        found = _whole(model)["table"]
        assert found.dtype is dtype
        assert torch.equal(found.view(torch.uint8), raw)
        zeroshard.close(model)


def test_frozen_parameters_of_other_dtypes_keep_their_bytes(tmp_path: Path) -> None:
    run_ranks(2, _any_dtype, tmp_path)


def _joined(rank: int, world: int) -> None:
    with zeroshard.QuantizedInit():
        model = build(quantized_task(CodedLinear))
    assert any(is_resting(part) for parameter in model.parameters() for part in parameters_of(parameter))


def test_ranks_that_have_met_are_not_asked_for_where_they_meet() -> None:
    """torch takes port 0 of a job of one process, as any that is free."""
    run_ranks(1, _joined, env={"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})

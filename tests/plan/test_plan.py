"""The plan is a value: it round-trips through JSON, compares, prints, and nothing else passes for one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, replace
from io import StringIO
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.plan.specs import blocks, plan_of, relaxed
from zeroshard.errors import PlanError
from zeroshard.fp8.recipe import Products, Scaling
from zeroshard.mesh import DATA, SHARD, Mesh, MeshAxis
from zeroshard.nvme.places import Spill
from zeroshard.plan.builder import Precision, Recipe, build_plan, for_gpu, reordered, with_order
from zeroshard.plan.placement import STAGES, Sharding, StateKind
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy, OnNonFinite
from zeroshard.plan.report import memory_table, traffic_table, unit_table
from zeroshard.sharding.units import ParameterSpec, UnitSpec

TIED = UnitSpec("", (ParameterSpec("embedding.weight", (8, 4), torch.float32),), (("head.weight", "embedding.weight"),))
MIXED = UnitSpec(
    "block0",
    (
        ParameterSpec("block0.w", (8, 4), torch.bfloat16),
        ParameterSpec("block0.norm", (8,), torch.float32),
        ParameterSpec("block0.base", (8, 4), torch.bfloat16, trainable=False),
        ParameterSpec("block0.empty", (0, 4), torch.bfloat16),
    ),
)
SAMPLE = plan_of([TIED, MIXED], 3, dp=4, accumulate=True)
TEXT = SAMPLE.to_json()
plans = st.builds(
    lambda row, dp, size, prefetch, reuse, accumulate, moments, precision: plan_of(
        [TIED, MIXED, *blocks(3)[2:]],
        row,
        dp=dp * size,
        shard=size,
        prefetch=prefetch,
        reuse=reuse,
        accumulate=accumulate,
        moments=moments,
        precision=precision,
    ),
    st.builds(
        lambda param, grad, state, axes: Sharding(param, grad, state or param or grad, axes),
        *[st.booleans()] * 3,
        st.sampled_from([DATA, (SHARD,)]),
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from([Precision(), Precision("bf16", "fp32", "bf16"), Precision("fp16", keep_fp32=("norm",))]),
)


@relaxed
@given(plans)
def test_json_gives_an_equal_plan_back(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()


def test_every_field_of_the_policy_survives() -> None:
    changed = {"prefetch": 2, "spare_nbytes": 5, "accumulate": True, "overlap_step": True, "predivide": 4.0}
    changed |= {"mean": False, "clip_norm": 0.5, "on_nonfinite": OnNonFinite.SKIP, "cast_inputs": "bfloat16"}
    changed |= {"parameter_sums": 2, "parameter_maxima": 1}
    changed |= {"stream_numel": 7, "pin_memory": False, "window_numel": 9, "spill": Spill(("/a", "/b"), encrypt=True)}
    changed |= {"products": Products(Scaling.ROWWISE, ("a", "b.c"), resting=False)}
    for changes in (changed, {"reuse": False, "peer_copies": True}):
        plan = SAMPLE.with_policy(**changes)
        assert plan.policy != ExecutionPolicy()
        assert Plan.from_json(plan.to_json()).policy == plan.policy
    alone = plan_of(blocks(3))
    plan = with_order(alone.units, alone.order, replace(alone.policy, micro_batches=4), alone.mesh)
    assert Plan.from_json(plan.to_json()) == plan
    assert {*changed, "reuse", "peer_copies", "micro_batches"} == set(ExecutionPolicy.__dataclass_fields__)


def test_a_plan_can_not_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        SAMPLE.dp = 2  # type: ignore[misc]


def test_plans_differ_where_their_text_differs() -> None:
    other = replace(SAMPLE, policy=replace(SAMPLE.policy, clip_norm=1.0))
    assert other != SAMPLE
    lines = difflib.unified_diff(SAMPLE.to_json().splitlines(), other.to_json().splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == ['-  "clip_norm": 0.0,', '+  "clip_norm": 1.0,']


def test_the_tables_print() -> None:
    console = Console(file=StringIO(), width=120)
    for table in (memory_table(SAMPLE), traffic_table(SAMPLE, micro_batches=2), unit_table(SAMPLE)):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("parameters", "optimizer moments", "all-gather", "(root)", "block0", "1/4"):
        assert word in text


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


def _changed(path: tuple[str | int, ...], change: Callable[[Any, Any], None]) -> str:
    data = json.loads(TEXT)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return json.dumps(data)


PATHS = list(_paths(json.loads(TEXT)))
WRONG = (None, True, -1, 1.5, "nonsense", [], {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "null",
        "1",
        "[]",
        "{}",
        '"plan"',
        "{",
        '{"mesh": 2}',
        '{"units": [], "mesh": {"axes": []}}',
        "NaN",
    ],
)
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a zeroshard plan"):
        Plan.from_json(text)


@relaxed
@given(st.text(max_size=30))
def test_any_text_is_refused_by_a_plan_error(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)


def test_a_missing_entry_is_refused_and_named() -> None:
    for path in PATHS:
        if isinstance(path[-1], int):
            continue
        text = _changed(path, lambda inner, key: inner.pop(key))
        with pytest.raises(PlanError) as caught:
            Plan.from_json(text)
        assert str(path[-1]) in str(caught.value), path


def test_an_unknown_entry_is_refused_and_named() -> None:
    holders = [(), *PATHS]
    for path in holders:
        data: Any = json.loads(TEXT)
        inner = data
        for key in path:
            inner = inner[key]
        if not isinstance(inner, dict):
            continue
        inner["surprise"] = 1
        with pytest.raises(PlanError, match="surprise"):
            Plan.from_json(json.dumps(data))


def test_a_wrong_type_is_refused_by_a_plan_error_or_gives_a_valid_plan() -> None:
    """Whatever is taken as a plan prints as the text that it was read from: nothing is bent into shape."""
    for path in PATHS:
        for wrong in WRONG:
            text = _changed(path, lambda inner, key, wrong=wrong: inner.__setitem__(key, wrong))
            try:
                plan = Plan.from_json(text)
            except PlanError:
                continue
            assert _exact(json.loads(plan.to_json())) == _exact(json.loads(text)), (path, wrong)


def _exact(value: Any) -> Any:
    """The value, with true and 1 told apart."""
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_exact(item) for item in value]
    return (value, isinstance(value, bool))


@pytest.mark.parametrize(
    ("path", "wrong", "words"),
    [
        (("mesh", "axes", 1, "size"), "two", ["mesh.axes[1].size", "whole number"]),
        (("mesh", "axes", 1, "size"), True, ["mesh.axes[1].size", "whole number"]),
        (("mesh", "axes", 1, "size"), 0, ["dp_shard", "0 ranks"]),
        (("mesh", "axes", 1, "size"), 3, ["shards is 4", "3 ranks"]),
        (("mesh", "axes", 0, "name"), "up", ["mesh axis 'up'", "dp_replicate"]),
        (("mesh", "axes", 0, "name"), "tp", ["mesh", "dp_replicate", "needed"]),
        (("order",), [0, 99], ["order", "99"]),
        (("gather_slots", "of_unit", 0), 99, ["gather_slots", "99"]),
        (("gather_slots", "of_unit"), [], ["gather_slots", "units"]),
        (("policy", "on_nonfinite"), "explode", ["on_nonfinite", "explode"]),
        (("policy", "prefetch"), 1.5, ["policy.prefetch", "whole number"]),
        (("units", 0, "axes"), ["diagonal"], ["units[0].axes", "diagonal"]),
        (("units", 1, "groups", 0, "param"), None, ["units[1].groups[0].param"]),
        (("units", 1, "groups", 0, "param", "dtype"), "int8", ["units[1].groups[0].param.dtype", "int8"]),
        (("units", 1, "groups", 0, "param", "tier"), "moon", ["units[1].groups[0].param.tier", "moon"]),
        (("units", 1, "groups", 0, "update_axes"), [], ["units[1].groups[0].update_axes", "divided"]),
        (("units", 1, "groups", 0, "layout", "numel"), "many", ["units[1].groups[0].layout.numel"]),
        (("units", 1, "groups", 0, "layout", "segments", 0, "shape"), [3, -4], ["segments[0].shape"]),
    ],
)
def test_the_message_says_where_and_what(path: tuple[str | int, ...], wrong: Any, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(_changed(path, lambda inner, key: inner.__setitem__(key, wrong)))
    assert all(word in str(caught.value) for word in words), str(caught.value)


# Building.


def test_groups_are_by_dtype_and_trainability() -> None:
    groups = SAMPLE.units[1].groups
    assert [(group.param.dtype, group.trainable) for group in groups] == [
        ("bfloat16", True),
        ("float32", True),
        ("bfloat16", False),
    ]
    assert [group.master is not None for group in groups] == [True, False, False]


def test_stages_are_rows_of_the_table() -> None:
    for stage, row in STAGES.items():
        for unit, group in plan_of(blocks(2), stage, dp=2).groups():
            for kind, sharded in ((StateKind.PARAM, row.param), (StateKind.GRAD, row.grad)):
                placement = group.placement(kind)
                assert placement is not None
                assert placement.axes == (DATA if sharded else ()), (stage, unit.label, kind)
            assert group.update_axes == (DATA if row.state else ())


def test_parameters_named_are_kept_in_fp32() -> None:
    units = [UnitSpec("", tuple(ParameterSpec(f"{name}.weight", (4,), torch.float32) for name in ("lin", "norm")))]
    plan = plan_of(units, 0, precision=Precision("bf16", keep_fp32=("norm",)))
    assert {group.layout.segments[0].name: group.param.dtype for _, group in plan.groups()} == {
        "lin.weight": "bfloat16",
        "norm.weight": "float32",
    }


@pytest.mark.parametrize(("dp", "shard"), [(0, None), (4, 3), (4, 0), (2, 4), (-1, None)])
def test_sizes_that_do_not_divide_are_refused(dp: int, shard: int | None) -> None:
    with pytest.raises(PlanError, match="divide"):
        plan_of(blocks(1), 3, dp=dp, shard=shard)


def test_axes_that_nothing_uses_yet_are_refused_by_name() -> None:
    mesh = Mesh((MeshAxis("dp_replicate", 1), MeshAxis("dp_shard", 2), MeshAxis("pp", 2)))
    with pytest.raises(PlanError, match=r"axis 'pp' has 2 ranks, but nothing uses it"):
        build_plan(blocks(1), Recipe(), mesh)
    one = Mesh((MeshAxis("pp", 1), MeshAxis("dp_replicate", 1), MeshAxis("dp_shard", 2)))
    assert build_plan(blocks(1), Recipe(), one).mesh == one


def test_a_plan_made_in_python_is_checked_as_one_that_is_read() -> None:
    plan = plan_of(blocks(2), 3, dp=4)
    unit = replace(plan.units[1], groups=(replace(plan.units[1].groups[0], update_axes=()),))
    with pytest.raises(PlanError, match=r"units\[1\]\.groups\[0\]\.update_axes"):
        replace(plan, units=(plan.units[0], unit, plan.units[2]))


def test_an_override_for_a_unit_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="places unit 'block9'"):
        build_plan(blocks(1), Recipe(overrides={"block9": STAGES[0]}), 1)


@pytest.mark.parametrize(("param", "grad"), [(True, True), (True, False), (False, True)])
def test_a_row_that_divides_what_every_rank_updates_is_refused(param: bool, grad: bool) -> None:
    with pytest.raises(PlanError, match="set state=True"):
        Sharding(param, grad, state=False)


def test_a_row_over_an_axis_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match=r"axes=\('tensor',\).*'dp_replicate', 'dp_shard'"):
        Sharding(True, True, True, axes=("tensor",))


@pytest.mark.parametrize(("dtype", "said"), [(torch.int8, "can't be trained"), (torch.complex64, "can't be trained")])
def test_dtypes_that_cannot_be_trained_are_refused_by_name(dtype: torch.dtype, said: str) -> None:
    with pytest.raises(PlanError, match=rf"'packed' has dtype {dtype}.*{said}"):
        plan_of([UnitSpec("", (ParameterSpec("packed", (4,), dtype),))], 3)


def test_frozen_integers_are_divided_in_their_own_dtype() -> None:
    plan = plan_of(
        [UnitSpec("", (ParameterSpec("packed", (4, 4), torch.int8, False),))], 3, precision=Precision("bf16")
    )
    group = plan.units[0].groups[0]
    assert (group.param.dtype, group.param.divided, group.master) == ("int8", True, None)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(PlanError, match="int3"):
        plan_of(blocks(1), 3, precision=Precision("int3"))


def test_the_persistence_budget_is_obeyed() -> None:
    recipe = Recipe(persistence_threshold=1024, persistence_budget=2500)
    plan = build_plan(blocks(4), recipe, 2)
    assert [unit.sharded for unit in plan.units[1:]] == [False, False, True, True]


@pytest.mark.parametrize(
    ("prefetch", "live", "depth"),
    [(None, None, 4), (0, None, 0), (1, None, 1), (1024, None, 1), (1025, None, 2), (None, 1024, 0), (None, 3072, 2)],
)
def test_prefetch_follows_the_element_budgets(prefetch: int | None, live: int | None, depth: int) -> None:
    recipe = Recipe(policy=ExecutionPolicy(prefetch=9), prefetch_numel=prefetch, live_numel=live)
    assert build_plan(blocks(6), recipe, 2).policy.prefetch == depth


def test_another_order_changes_slots_and_order_only() -> None:
    plan = plan_of(blocks(4), 3, prefetch=1)
    other = reordered(plan, (0, 4, 2, 3, 1))
    assert (other.units, other.policy) == (plan.units, plan.policy)
    assert other.order == (0, 4, 2, 3, 1)
    slots = [other.gather_slots.of_unit[unit] for unit in other.order[1:]]
    assert slots == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("seen", "order"),
    [((0, 1, 4), (0, 1, 2, 3, 4)), ((0,), (0, 1, 2, 3, 4)), ((0, 4, 1), (0, 4, 1, 2, 3)), ((0, 3), (0, 1, 2, 3, 4))],
)
def test_units_that_an_order_lacks_come_where_the_plan_has_them(seen: tuple[int, ...], order: tuple[int, ...]) -> None:
    assert reordered(plan_of(blocks(4), 3), seen).order == order


@relaxed
@given(plans)
def test_reduce_slots_hold_all_groups_that_need_them(plan: Plan) -> None:
    for index, unit in enumerate(plan.units):
        slot = plan.reduce_slots.of_unit[index]
        needed = sum(g.wire_nbytes + g.staging_nbytes for g in unit.groups if g.needs_reduce_slot)
        assert (slot is None) == (needed == 0)
        assert slot is None or plan.reduce_slots.nbytes[slot] >= needed


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_on_gpus_stage_1_divides_the_gradients_of_one_micro_batch_unless_they_are_never_reduced(
    compressed: bool, micro_batches: int
) -> None:
    policy = ExecutionPolicy(accumulate=micro_batches > 1)
    recipe = for_gpu(Recipe(STAGES[1], policy=policy, compressed=compressed), split_master=False)
    plan = build_plan(blocks(2), recipe, 2)
    divided = {group.grad.divided for _, group in plan.groups() if group.grad is not None}
    assert divided == {micro_batches == 1 and not compressed}

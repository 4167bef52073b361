"""A plan whose parts contradict each other is refused, with the place, whether it comes from Python or from JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from tests.plan.specs import blocks, plan_of
from zeroshard.errors import PlanError
from zeroshard.fp8.recipe import Fp8
from zeroshard.mesh import Mesh, MeshAxis
from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.hops import Feedback, GradientCodes
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES, Blocks, Sharding
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy, HostUpdate
from zeroshard.sharding.units import ParameterSpec, UnitSpec

UNITS = blocks(3, root=8)
NODES = Mesh((MeshAxis("dp_replicate", 2), MeshAxis("dp_shard", 2)))
PLANS = {
    "whole": plan_of(UNITS, 0, dp=2),
    "stage 1": plan_of(UNITS, 1, dp=2, accumulate=True),
    "stage 3": plan_of(UNITS, 3, dp=2, accumulate=True, precision=Precision("bf16")),
    "in turn": build_plan(UNITS, Recipe(policy=ExecutionPolicy(micro_batches=3)), 2),
    "codes": build_plan(
        UNITS,
        Recipe(
            STAGES[3].with_second_copies(NODES),
            codes=Blocks(8, 256),
            gradient_codes=GradientCodes(feedback=Feedback(0.5)),
        ),
        NODES,
    ),
    "host": build_plan(UNITS, Recipe(offload=Offload(param=True, update=HostUpdate.PROCESSOR)), 2),
}
WRONG = (None, True, -1, 1.5, 2**70, float("nan"), "nonsense", [], {})
Path = tuple[str | int, ...]


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


def _changed(plan: Plan, path: Path, new: Any) -> Any:
    data = json.loads(plan.to_json())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new(inner[path[-1]]) if callable(new) else new
    return data


def _built(kind: Any, value: Any) -> Any:
    """What a script builds that calls the constructors with the values of the JSON."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _built(next(one for one in arguments if one is not NoneType), value)
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_built(one, item) for one, item in zip(kinds, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next((member for member in kind if type(value) is str and member.value == value), value)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        return kind(**{name: _built(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    return value


def _verdict(make: Callable[[], Any]) -> bool:
    try:
        return isinstance(make(), Plan)
    except PlanError:
        return False


@pytest.mark.parametrize("name", PLANS)
def test_a_value_in_a_plan_is_refused_from_python_as_from_json(name: str) -> None:
    for path in _paths(json.loads(PLANS[name].to_json())):
        if any(isinstance(key, int) and key > 1 for key in path):
            continue  # the others are alike
        for wrong in WRONG:
            data = _changed(PLANS[name], path, wrong)
            taken = _verdict(lambda data=data: Plan.from_json(json.dumps(data)))
            if isinstance(wrong, dict) and not taken:
                continue  # no object of Python
            assert _verdict(lambda data=data: _built(Plan, data)) == taken, (path, wrong)


def _twice(groups: Any) -> Any:
    return [*groups, *groups]


GROUP = ("units", 1, "groups", 0)


@pytest.mark.parametrize(
    ("name", "path", "new", "said"),
    [
        ("whole", ("units", 1, "groups"), _twice, r"parameter 'block0.weight' is in two places"),
        ("whole", (*GROUP, "param", "residency"), "around_use", r"groups\[0\]\.param\.residency"),
        ("whole", (*GROUP, "param", "copies"), 2, r"groups\[0\]\.param\.copies must be 1, is 2"),
        ("whole", (*GROUP, "grad", "copies"), 2, r"groups\[0\]\.grad\.copies must be 1"),
        ("whole", (*GROUP, "grad", "residency"), "around_use", r"groups\[0\]\.grad\.residency"),
        ("whole", (*GROUP, "moments", "dtype"), "bfloat16", r"groups\[0\]\.moments\.dtype must be 'float32'"),
        ("stage 1", ("order",), lambda order: order[1:], r"order leaves out unit 0 \(\(root\)\)"),
        ("stage 1", ("order",), [], r"order leaves out unit 0"),
        ("stage 1", (*GROUP, "update_axes"), [], r"groups\[0\]\.moments\.axes must be update_axes, \[\]"),
        ("stage 3", (*GROUP, "param", "axes"), [], r"groups\[0\]\.param\.residency is 'around_use'"),
        ("stage 3", (*GROUP, "staged"), False, r"groups\[0\]\.staged must be true where gradients are added up"),
        ("stage 3", (*GROUP, "grad", "residency"), "around_use", r"one micro-batch per step"),
        ("stage 3", (*GROUP, "master", "dtype"), "bfloat16", r"groups\[0\]\.master\.dtype must be 'float32'"),
        ("stage 3", (*GROUP, "master", "axes"), [], r"groups\[0\]\.master\.axes must be update_axes"),
        ("stage 3", (*GROUP, "moments", "axes"), [], r"groups\[0\]\.moments\.axes must be update_axes"),
        ("stage 3", ("gather_slots", "of_unit", 0), 1, r"share slot 1, but unit 0 \(\(root\)\) stays gathered"),
        ("stage 3", ("gather_slots", "of_unit", 2), 0, r"units 1 and 2 share slot 0, but follow each other"),
        ("stage 3", ("kept",), [1], r"share slot 0, but unit 1 \(block0\) stays gathered"),
        ("codes", ("gather_slots", "nbytes"), lambda sizes: sizes[:-1], r"gather_slots\.nbytes needs a last slot"),
        ("codes", ("reduce_slots", "nbytes"), lambda sizes: sizes[:-1], r"reduce_slots\.nbytes needs a last slot"),
        ("in turn", ("sum_slots", "of_unit", 0), 0, r"sum_slots\.of_unit: unit 0 \(\(root\)\) shares slot 0"),
        ("host", (*GROUP, "grad", "residency"), "around_use", r"divided gradients on the device"),
    ],
)
def test_parts_of_a_plan_that_contradict_each_other_are_refused(name: str, path: Path, new: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan.from_json(json.dumps(_changed(PLANS[name], path, new)))


def test_a_group_that_rests_whole_in_a_unit_that_is_gathered_is_refused() -> None:
    """It was shown from a slot that no gather writes."""
    frozen = ParameterSpec("block0.base", (8, 4), torch.float32, trainable=False)
    unit = UnitSpec("block0", (*UNITS[1].parameters, frozen))
    data = _changed(plan_of([UNITS[0], unit], 3, dp=2), ("units", 1, "groups", 1, "param", "axes"), [])
    with pytest.raises(
        PlanError, match=r"units\[1\]\.groups\[1\]\.param\.axes: the parameters of a unit are divided in"
    ):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ExecutionPolicy(prefetch=1.5), "ExecutionPolicy: prefetch must be a whole number"),
        (lambda: ExecutionPolicy(prefetch=-1), r"policy\.prefetch must not be negative"),
        (lambda: ExecutionPolicy(window_numel=-1), r"policy\.window_numel must not be negative"),
        (lambda: ExecutionPolicy(clip_norm="1"), "ExecutionPolicy: clip_norm must be a finite number, not '1'"),
        (
            lambda: ExecutionPolicy(on_nonfinite="raise"),
            r"on_nonfinite must be one of OnNonFinite\.RAISE, .* not 'raise'",
        ),
        (lambda: ExecutionPolicy(mean="no"), "ExecutionPolicy: mean must be True or False, not 'no'"),
        (lambda: Precision(keep_fp32="norm"), "Precision: keep_fp32 must be a tuple with each item a string"),
        (lambda: Precision(matmul="fp8"), "Precision: matmul must be of class Fp8 or None"),
        (lambda: Recipe(3), "Recipe: sharding must be of class Sharding, not 3"),
        (
            lambda: Recipe(overrides={"a": 0}),
            "Recipe: overrides must be a mapping: its keys a string, its values of class Sharding",
        ),
        (lambda: Recipe(offload=True), "Recipe: offload must be of class Offload or None, not True"),
        (lambda: Recipe(gradient_codes=True), "Recipe: gradient_codes must be of class GradientCodes or None"),
        (lambda: Recipe(live_numel=1e9), "Recipe: live_numel must be a whole number"),
        (lambda: Recipe(persistence_threshold=-1), "Recipe: persistence_threshold must be 0 or more"),
        (lambda: Sharding("False", "False", "False"), "Sharding: param must be True or False"),
        (lambda: Sharding(True, True, True, axes=["dp_shard"]), "Sharding: axes must be a tuple"),
        (lambda: Blocks("8", 256), "Blocks: bits must be a whole number"),
        (lambda: Feedback("0.5"), "Feedback: beta must be a finite number"),
        (lambda: Fp8(tokens="8192"), "Fp8: tokens must be a whole number"),
        (lambda: MeshAxis("dp_shard", 2.0), "MeshAxis: size must be a whole number"),
        (lambda: Mesh([MeshAxis("dp_shard", 2)]), "Mesh: axes must be a tuple with each item of class MeshAxis"),
        (lambda: Mesh.data_parallel(4, "2"), "a shard group: '2' must be a whole number of ranks"),
    ],
)
def test_a_field_of_another_type_is_refused_by_its_name(make: Callable[[], object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        make()


def test_dtypes_of_torch_stand_for_their_names() -> None:
    precision = Precision(torch.bfloat16, torch.float16, torch.float32, torch.float32)  # type: ignore[arg-type]
    assert precision == Precision("bfloat16", "float16", "float32", "float32")
    assert ExecutionPolicy(cast_inputs=torch.float16).cast_inputs == "float16"  # type: ignore[arg-type]

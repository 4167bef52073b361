"""Builds a Plan from the units of a model, a mesh and a recipe. The only place that knows ZeRO's stages by number.

A recipe says how units are sharded (by one row of the placement table for all units, or a row per unit), which dtypes
the state has, and how a step runs. Padding, slots and order are computed from it and are part of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from zeroshard.errors import PlanError
from zeroshard.field_types import check_fields
from zeroshard.fp8.recipe import Fp8
from zeroshard.mesh import DATA, NESTED, SHARD, Mesh
from zeroshard.plan.check import peer_problem
from zeroshard.plan.dtypes import LOW_PRECISION, dtype_name, is_packed, itemsize, name_of, packed_name, state_dtype
from zeroshard.plan.factors import with_factor_ranks
from zeroshard.plan.groups import GroupPlan, SecondCopy, UnitPlan
from zeroshard.plan.hops import GradientCodes, Hop, hops_of
from zeroshard.plan.matrices import with_owners
from zeroshard.plan.offload import Offload, with_host_state
from zeroshard.plan.placement import STAGES, Blocks, Placement, Residency, Sharding
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.plan.sums import sum_slots
from zeroshard.sharding.layout import flat_layout
from zeroshard.sharding.slots import SlotPlan, assign_slots
from zeroshard.sharding.units import ParameterSpec, UnitSpec

MAX_PREFETCH = 4
SCALED = "float8_e4m3fn"
"""The dtype of resting weights that are multiplied in fp8."""
NO_MASTER = "none"
SPLIT_MASTER = "int16"
"""Master weights as the remainder beside bfloat16 parameters; see optim.split_master."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of the state.

    Attributes:
        param: compute dtype of floating parameters; None keeps each parameter's own.
        wire: dtype of gradients on the wire; None takes the compute dtype.
        accumulate: dtype of gradients between micro-batches; None means float32, and float64 for such parameters.
        master: dtype of master weights: 'float32', or 'int16' for the remainder beside bfloat16 parameters (see
            optim.split_master), or 'none' for 16-bit parameters that are updated themselves; None lets the caller
            choose, and is float32 here.
        moments: dtype of the moments of parameters without master weights; None is float32.
        keep_fp32: parameters (by name prefix or dotted part) that stay in float32.
        matmul: how linear layers multiply in fp8; None in compute dtype. `shard` chooses the layers.
    """

    param: str | None = None
    wire: str | None = None
    accumulate: str | None = None
    master: str | None = None
    moments: str | None = None
    keep_fp32: tuple[str, ...] = ()
    matmul: Fp8 | None = None

    def __post_init__(self) -> None:
        for name in ("param", "wire", "accumulate", "master", "moments"):
            object.__setattr__(self, name, name_of(getattr(self, name)))
        check_fields(self)


@dataclass(frozen=True)
class Recipe:
    """How to build a plan.

    Attributes:
        sharding: placement row for every unit.
        overrides: rows for single units, by unit name ("" is the root).
        precision: dtypes.
        policy: how a step runs; its `prefetch` is an upper bound that the element budgets below may lower.
        moments: optimizer state tensors per parameter (Adam 2, SGD with momentum 1).
        blocks: quantize the moments of parameters that suit (`Blocks.suit`) in such blocks. These parameters form
            separate flat groups, in which no block spans two ranks. None keeps all moments in float32.
        matrices: parameters that the optimizer updates as whole matrices, with one state tensor each (Muon). They form
            separate flat groups, since they have other moments.
        factor_ranks: the ranks of the factors of parameters that are updated from these (Dion); as `matrices` they form
            separate flat groups.
        compressed: the optimizer averages momentum in compressed form; see GroupPlan.
        persistence_threshold: a sharded unit whose parameters all have at most this many elements stays gathered.
        persistence_budget: elements that may stay gathered for that reason.
        transient_gradients: sharded gradients of one micro-batch take memory only from backward to step; None lets the
            caller choose, and is False here.
        prefetch_numel, live_numel: elements gathered ahead of use, and gathered at any time.
        peer_copies: see ExecutionPolicy; None lets the caller choose, and is False here.
        offload: the state that rests in host memory or on disk; None for none.
        codes, frozen_codes: blocks of the codes in which trainable and frozen sharded parameters are gathered (qwZ).
        differences: blocks of the codes in which only a step's changes are sent to second copies; None sends all.
        gradient_codes: quantize gradients for their sums within subgroups and between them (qgZ).
    """

    sharding: Sharding = STAGES[3]
    overrides: Mapping[str, Sharding] = field(default_factory=dict)
    precision: Precision = Precision()
    policy: ExecutionPolicy = field(default_factory=ExecutionPolicy)
    moments: int = 2
    blocks: Blocks | None = None
    matrices: tuple[str, ...] = ()
    factor_ranks: Mapping[str, int] = field(default_factory=dict)
    compressed: bool = False
    persistence_threshold: int = 0
    persistence_budget: int = 2**63 - 1
    transient_gradients: bool | None = None
    prefetch_numel: int | None = None
    live_numel: int | None = None
    peer_copies: bool | None = None
    offload: Offload | None = None
    codes: Blocks | None = None
    frozen_codes: Blocks | None = None
    differences: Blocks | None = None
    gradient_codes: GradientCodes | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("moments", "persistence_threshold", "persistence_budget", "prefetch_numel", "live_numel"):
            number = getattr(self, name)
            if number is not None and number < 0:
                raise PlanError(f"Recipe: {name} must be 0 or more, is {number}")


def for_gpu(recipe: Recipe, *, split_master: bool) -> Recipe:
    """The recipe with its open choices made for a GPU's memory: transient gradients, and split master weights.

    Stage 1 keeps whole gradients in order to reduce them once for several micro-batches. With one micro-batch per step
    each rank keeps only its reduced part, as in stage 2. Optimizers that send compressed momentum instead of gradients
    never reduce them, and keep them whole.

    Args:
        split_master: the optimizer can update split master weights (Adam in the device's own kernel).
    """
    precision = recipe.precision
    if precision.master is None and split_master:
        precision = replace(precision, master=SPLIT_MASTER)
    transient = True if recipe.transient_gradients is None else recipe.transient_gradients
    row, rows = recipe.sharding, recipe.overrides
    if transient and not recipe.policy.accumulate and not recipe.compressed:
        row, rows = _reduced_at_once(row), {name: _reduced_at_once(other) for name, other in rows.items()}
    return replace(recipe, sharding=row, overrides=rows, precision=precision, transient_gradients=transient)


def _reduced_at_once(row: Sharding) -> Sharding:
    return replace(row, grad=row.grad or row.state)


def build_plan(units: Sequence[UnitSpec], recipe: Recipe, mesh: Mesh | int) -> Plan:
    """The plan for `units` (root first, as `find_units` gives them) on the ranks of `mesh`.

    Args:
        mesh: the ranks as named axes, or a number of data-parallel ranks.

    Raises:
        PlanError: sizes that don't fit, an override for a unit that isn't there, a dtype that can't be sharded.
    """
    mesh = Mesh.data_parallel(mesh) if isinstance(mesh, int) else mesh
    unknown = set(recipe.overrides) - {unit.name for unit in units}
    if unknown:
        raise PlanError(
            f"the recipe places unit {sorted(unknown)[0]!r}, but the model has units {[u.name for u in units]}"
        )
    budget = recipe.persistence_budget
    planned: list[UnitPlan] = []
    for unit in units:
        row = _with_model_axes(recipe.overrides.get(unit.name, recipe.sharding), mesh)
        numel = sum(_numel(parameter) for parameter in unit.parameters)
        if mesh.size(row.axes) == 1:  # the shard is the whole: no slot and no copy, unless it is offloaded
            row = _undivided(row, recipe)
        if row.param and unit.parameters and _persists(unit, recipe.persistence_threshold) and numel <= budget:
            budget -= numel
            row = Sharding(param=False, grad=row.grad, state=row.state, axes=row.axes)
        second = SecondCopy((SHARD,), mesh.size((SHARD,))) if row.axes == NESTED else None
        hops = _hops(row, mesh, recipe)
        planned.append(_unit_plan(unit, row, mesh, recipe, second, hops))
    planned = with_factor_ranks(with_owners(planned, recipe.matrices), recipe.factor_ranks)
    policy = recipe_policy(planned, recipe)
    if recipe.offload is not None:
        planned, policy = with_host_state(planned, policy, recipe.offload)
    plan = with_order(planned, tuple(range(len(planned))), policy, mesh)
    return with_peer_copies(plan) if recipe.peer_copies else plan


def _hops(row: Sharding, mesh: Mesh, recipe: Recipe) -> tuple[Hop, ...]:
    """The hops of quantized gradients for a unit with this row; () if its gradients are not quantized."""
    codes = recipe.gradient_codes
    if codes is None or mesh.size(row.axes) == 1 or not row.state:
        return ()
    if recipe.compressed:
        raise PlanError(
            "quantized gradients (zero_quantized_gradients): a 1-bit optimizer compresses momentum itself, after steps "
            "with exact gradients; use only one of the two"
        )
    if mesh.beside_data:
        raise PlanError(
            f"quantized gradients (zero_quantized_gradients) are not supported on a mesh that divides sequences or "
            f"experts ({mesh}); use only one of the two"
        )
    if mesh.size(DATA) > mesh.size(row.axes):
        raise PlanError(
            "quantized gradients (zero_quantized_gradients): each subgroup holds a copy of the state (MiCS, HSDP), and "
            "sums over copies are exact; divide over all ranks (zero_hpz_partition_size), or leave the key out"
        )
    within = (SHARD,) if row.axes == NESTED else ()
    return hops_of(codes, row.axes, within, one_each=mesh.size((SHARD,)) == 1)


def _with_model_axes(row: Sharding, mesh: Mesh) -> Sharding:
    """The row with its state also divided over the axes of sequences and experts."""
    if mesh.beside_data and row.axes == NESTED:
        raise PlanError(
            f"a second copy of the parameters in each subgroup (zero_hpz_partition_size) is not supported on a mesh "
            f"that divides sequences or experts ({mesh}); use only one of the two"
        )
    return replace(row, axes=(*row.axes, *mesh.beside_data)) if mesh.beside_data else row


def _undivided(row: Sharding, recipe: Recipe) -> Sharding:
    """The row for a single rank: state is not divided, but offloaded state still passes through slots."""
    param = recipe.offload is not None and recipe.offload.param
    grad = recipe.offload is not None and not recipe.policy.accumulate
    return Sharding(param=row.param and param, grad=row.grad and grad, state=row.state, axes=row.axes)


def with_order(
    units: Sequence[UnitPlan],
    order: Sequence[int],
    policy: ExecutionPolicy,
    mesh: Mesh,
    kept: Sequence[int] = (),
) -> Plan:
    """The plan whose forward uses `units` in `order`; slots are assigned anew."""
    sharded = [index for index in order if units[index].sharded]
    root = [index for index in dict.fromkeys(sharded) if units[index].name == "" or index in kept]
    sizes = [unit.gathered_nbytes for unit in units]
    records = (group.record_nbytes * group.records for unit in units for group in unit.groups)
    gather = _with_code_slot(_gather_slots(sharded, root, sizes, policy), records)
    reduced = [index for index in dict.fromkeys(reversed(order)) if units[index].reduce_slot_nbytes]
    reduce = assign_slots(reduced, [unit.reduce_slot_nbytes for unit in units], distance=1)
    reduce = _with_code_slot(reduce, (group.exchange_nbytes for unit in units for group in unit.groups))
    sums = sum_slots(units, order, policy, kept)
    return Plan(mesh, tuple(units), tuple(order), policy, gather, reduce, tuple(kept), sums)


def _gather_slots(
    sharded: Sequence[int], root: Sequence[int], sizes: Sequence[int], policy: ExecutionPolicy
) -> SlotPlan:
    """Slots for the units that are gathered; with spare memory the last units get their own slots and stay gathered."""
    smallest = slots = assign_slots(sharded, sizes, distance=policy.prefetch, dedicated=root)
    kept = list(root)
    for unit in reversed(tuple(dict.fromkeys(sharded))):
        if policy.spare_nbytes and unit not in kept:
            kept.append(unit)
            larger = assign_slots(sharded, sizes, distance=policy.prefetch, dedicated=kept)
            if larger.total_nbytes - smallest.total_nbytes > policy.spare_nbytes:
                break
            slots = larger
    return slots


def _with_code_slot(slots: SlotPlan, needed: Iterable[int]) -> SlotPlan:
    """The slots with an extra one at the end, for codes: as large as the largest group needs, used by all in turn."""
    nbytes = max(needed, default=0)
    return replace(slots, nbytes=(*slots.nbytes, nbytes)) if nbytes else slots


def with_peer_copies(plan: Plan) -> Plan:
    """The same plan with copies between peers instead of collectives. Raises PlanError if `peer_problem` finds one."""
    problem = peer_problem(plan)
    if problem is not None:
        raise PlanError(f"peer_copies: {problem}")
    policy = replace(plan.policy, peer_copies=True)
    return with_order(plan.units, plan.order, policy, plan.mesh, kept=plan.kept)


def with_kept(plan: Plan, kept: Sequence[int]) -> Plan:
    """The same plan with these units gathered for the whole pass, each in a slot of its own."""
    return with_order(plan.units, plan.order, plan.policy, plan.mesh, kept=kept)


def reordered(plan: Plan, order: Sequence[int]) -> Plan:
    """The same plan for a forward that uses the units in another order.

    Units that this forward did not use (for example randomly dropped blocks) keep their place after the unit before
    them. At the end of the list a later use of them would run the list past all other units.
    """
    assert set(order) <= set(range(len(plan.units)))
    whole, before = list(order), None
    for index in plan.order:
        if index not in whole:
            place = len(whole) - whole[::-1].index(before) if before is not None else 0
            whole.insert(place, index)
        before = index
    return with_order(plan.units, whole, plan.policy, plan.mesh, kept=plan.kept)


def recipe_policy(units: Sequence[UnitPlan], recipe: Recipe) -> ExecutionPolicy:
    """The recipe's policy with `prefetch` lowered to what the element budgets allow for units of median size."""
    policy = recipe.policy
    sizes = [sum(group.layout.numel for group in unit.groups) for unit in units if unit.sharded and unit.name]
    depth = policy.prefetch
    if sizes:
        typical = max(1, int(median(sizes)))
        if recipe.prefetch_numel is not None:
            wanted = -(-recipe.prefetch_numel // typical) if recipe.prefetch_numel else 0
            depth = min(depth, wanted)
        if recipe.live_numel is not None:
            depth = min(depth, max(0, recipe.live_numel // typical - 1))
    cast = dtype_name(policy.cast_inputs) if policy.cast_inputs is not None else None
    return replace(policy, prefetch=max(0, min(depth, MAX_PREFETCH)), cast_inputs=cast)


def _persists(unit: UnitSpec, threshold: int) -> bool:
    return all(_numel(parameter) <= threshold for parameter in unit.parameters)


def _numel(parameter: ParameterSpec) -> int:
    total = 1
    for size in parameter.shape:
        total *= size
    return total


def _unit_plan(
    unit: UnitSpec,
    row: Sharding,
    mesh: Mesh,
    recipe: Recipe,
    second: SecondCopy | None = None,
    hops: tuple[Hop, ...] = (),
) -> UnitPlan:
    members: dict[tuple[str, bool, bool, bool, Blocks | None, str, bool], list[ParameterSpec]] = {}
    tied = {name for _, name in unit.aliases}
    for parameter in unit.parameters:
        matrix = parameter.name in recipe.matrices or parameter.name in recipe.factor_ranks
        matrix = matrix and parameter.trainable
        if matrix and parameter.cut is not None:
            raise PlanError(
                f"parameter {parameter.name!r} is divided over {parameter.cut.ranks} ranks of {parameter.cut.axis!r}, "
                "but the optimizer (Muon, Dion) works on whole matrices: give it to AdamW, or don't divide it"
            )
        suits = recipe.blocks is not None and parameter.trainable and recipe.blocks.suit(_numel(parameter))
        key = (
            _compute_dtype(parameter, recipe.precision),
            parameter.trainable,
            parameter.packed,
            matrix,
            recipe.blocks if suits else None,
            "" if parameter.cut is None else parameter.cut.axis,
            not matrix and parameter.name not in tied and _rests_in_fp8(parameter, recipe),
        )
        members.setdefault(key, []).append(parameter)
    groups = (
        _group_plan(
            parameters,
            dtype,
            trainable,
            _without_axis(row, axis),
            mesh,
            recipe,
            1 if parameters[0].name in recipe.matrices else recipe.moments,
            blocks,
            scaled=scaled,
        )
        for (dtype, trainable, _, matrix, blocks, axis, scaled), parameters in members.items()
    )
    groups = tuple(replace(group, second=second, hops=hops if group.trainable else ()) for group in groups)
    return UnitPlan(unit.name, row.axes, groups, unit.aliases)


def _rests_in_fp8(parameter: ParameterSpec, recipe: Recipe) -> bool:
    """Whether the parameter rests in fp8: it is wanted, and the step can make fp8 codes from its master weights."""
    low = _compute_dtype(parameter, recipe.precision) in LOW_PRECISION
    products = recipe.policy.products
    wanted = products is not None and parameter.trainable and parameter.name in products.resting_weights
    updated = recipe.precision.master != NO_MASTER and not recipe.compressed and recipe.offload is None
    return wanted and low and updated


def _without_axis(row: Sharding, axis: str) -> Sharding:
    """The row for parameters that the model divides over `axis`: ZeRO divides each part over the other axes."""
    return replace(row, axes=tuple(other for other in row.axes if other != axis)) if axis in row.axes else row


def _master_dtype(dtype: str, precision: Precision) -> str:
    kept = "float32" if precision.master in (None, "fp32") else precision.master
    if kept not in ("float32", "int16"):
        raise PlanError(f"master weights in {kept}: use 'float32', or 'int16' (the remainder beside bfloat16)")
    return kept if dtype == "bfloat16" else "float32"


def _compute_dtype(parameter: ParameterSpec, precision: Precision) -> str:
    packed = packed_name(parameter.dtype)
    if parameter.dtype.is_complex and (parameter.trainable or packed is None):
        raise PlanError(
            f"parameter {parameter.name!r} has dtype {parameter.dtype}, which can't be trained: hold its real and "
            "imaginary part as one parameter with a last dim of 2, and use torch.view_as_complex in the forward"
        )
    if packed is not None:
        if parameter.trainable:
            raise PlanError(
                f"parameter {parameter.name!r} has dtype {parameter.dtype} and requires a gradient; packed and whole "
                "numbers can't be trained: call requires_grad_(False), or dequantize it"
            )
        return packed
    if not parameter.dtype.is_floating_point:
        raise PlanError(
            f"parameter {parameter.name!r} has dtype {parameter.dtype}, which can't be sharded: register it as a "
            "buffer if it is frozen"
        )
    own = dtype_name(parameter.dtype)
    if precision.param is None:
        return own
    dotted = f".{parameter.name}."
    kept = any(f".{kept}." in dotted for kept in precision.keep_fp32)
    wanted = "float32" if kept else dtype_name(precision.param)
    if not parameter.packed:
        return wanted
    if parameter.unknown_class and wanted != own:
        raise PlanError(
            f"parameter {parameter.name!r} is frozen, of class {parameter.unknown_class} and in {own}, while the model "
            f"computes in {wanted}. Its class does not say whether these are plain numbers: if they are, cast them "
            "before (parameter.data = parameter.data.to(dtype)); if they are codes, which a cast would destroy, let "
            "the class define its conversion (to), or keep them in torch.uint8"
        )
    return own


def _group_plan(
    parameters: Sequence[ParameterSpec],
    dtype: str,
    trainable: bool,
    row: Sharding,
    mesh: Mesh,
    recipe: Recipe,
    copies: int,
    blocks: Blocks | None,
    *,
    scaled: bool,
) -> GroupPlan:
    shards = mesh.size(row.axes)
    packed = is_packed(dtype) or any(parameter.packed for parameter in parameters)
    coded = row.param and shards > 1 and not packed and not scaled
    codes = (recipe.codes if trainable else recipe.frozen_codes) if coded else None
    differences = recipe.differences if row.param and trainable and row.axes == NESTED and not scaled else None
    summed = recipe.gradient_codes if trainable and row.state and shards > 1 else None
    sizes = [one.size for one in (blocks, codes, differences) if one is not None]
    block = math.lcm(*sizes, 1 if summed is None else summed.block)
    layout = flat_layout(
        ((parameter.name, parameter.shape) for parameter in parameters),
        shards=shards,
        itemsize=itemsize(SCALED if scaled else dtype),
        block=block,
        cuts={parameter.name: parameter.cut for parameter in parameters if parameter.cut is not None},
    )
    residency = Residency.AROUND_USE if row.param else Residency.RESIDENT
    param = Placement(row.placed(row.param), SCALED if scaled else dtype, residency=residency)
    if not trainable:
        return GroupPlan(layout, trainable, param, codes=codes)
    precision = recipe.precision
    # A group that computes in float32 is never rounded on the wire unless the recipe says so.
    wire = dtype_name(precision.wire) if precision.wire else dtype
    # Micro-batches that pass a unit together are summed before its reduce: in whole gradients, or beside divided ones.
    several = recipe.policy.accumulate or (recipe.policy.micro_batches > 1 and not row.grad)
    kept = dtype_name(precision.accumulate or state_dtype(dtype)) if several else wire
    transient = bool(recipe.transient_gradients) and row.grad and not several and kept == wire
    grad = Placement(row.placed(row.grad), kept, residency=Residency.AROUND_USE if transient else Residency.RESIDENT)
    state_axes = row.placed(row.state)
    needs_slot = row.grad or kept != wire
    low = dtype in LOW_PRECISION
    themselves = low and precision.master == NO_MASTER
    master = Placement(state_axes, _master_dtype(dtype, precision)) if low and not themselves else None
    if scaled:
        master = Placement(state_axes, "float32")
    kind = dtype_name(precision.moments) if themselves and precision.moments else state_dtype(dtype)
    moments = Placement(state_axes, kind, copies=copies, blocks=blocks) if copies else None
    return GroupPlan(
        layout,
        trainable,
        param,
        wire=wire,
        staged=needs_slot and (several or kept != wire),
        update_axes=state_axes,
        sums=(*DATA, *(axis for axis in row.axes if axis not in DATA)),
        grad=grad,
        master=master,
        moments=moments,
        compressed=recipe.compressed,
        codes=codes,
        differences=differences,
        shown=dtype if scaled else "",
        scale_block=recipe.policy.products.scaling.block if scaled and recipe.policy.products is not None else 0,
    )

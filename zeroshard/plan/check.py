"""Checks that the parts of a plan fit each other; a plan that was edited by hand or read from JSON may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroshard.errors import PlanError
from zeroshard.mesh import DATA, MODEL_AXES, NESTED, SEQUENCE, SHARD, Mesh
from zeroshard.plan.dtypes import LOW_PRECISION, dtype_name, is_packed, state_dtype
from zeroshard.plan.groups import GroupPlan, SecondCopy, UnitPlan
from zeroshard.plan.hops import block_problem
from zeroshard.plan.placement import Blocks, Placement, Residency, StateKind
from zeroshard.plan.policy import ExecutionPolicy, HostUpdate
from zeroshard.plan.sums import spread_units, sum_nbytes
from zeroshard.sharding.layout import FlatLayout, matrix_shape
from zeroshard.sharding.slots import SlotPlan

if TYPE_CHECKING:
    from zeroshard.plan.plan import Plan


def check_plan(plan: Plan) -> None:
    """Raises PlanError if the parts of a plan don't fit each other; the message has the JSON path."""
    _check_mesh(plan.mesh)
    names = [unit.name for unit in plan.units]
    if names.count("") != 1 or len(set(names)) != len(names):
        raise PlanError('units: each needs a name of its own, and one of them must be the root, ""')
    _check_parameters(plan)
    for unit in plan.order:
        if not 0 <= unit < len(plan.units):
            raise PlanError(f"order names unit {unit}, but there are {len(plan.units)} units")
    for unit in plan.kept:
        if not (0 <= unit < len(plan.units) and plan.units[unit].name):
            raise PlanError(f"kept names unit {unit}, which is not a unit besides the root")
    if plan.policy.peer_copies and (problem := peer_problem(plan)) is not None:
        raise PlanError(f"policy.peer_copies: {problem}")
    if plan.policy.cast_inputs is not None:
        _check_dtype(plan.policy.cast_inputs, "policy.cast_inputs")
    for index, unit in enumerate(plan.units):
        _check_unit(plan, unit, f"units[{index}]")
        if unit.groups and index not in plan.order:
            raise PlanError(f"order leaves out unit {index} ({unit.label}), so its gradients would not be reduced")
    _check_scales(plan)
    gathered = [unit.gathered_nbytes if unit.sharded else None for unit in plan.units]
    _check_slots(plan.gather_slots, gathered, plan.order, "gather_slots")
    _check_shared_slots(plan)
    reduced = [unit.reduce_slot_nbytes or None for unit in plan.units]
    _check_slots(plan.reduce_slots, reduced, plan.order, "reduce_slots")
    groups = [group for _, group in plan.groups()]
    records = max((group.record_nbytes * group.records for group in groups), default=0)
    _check_code_slot(plan.gather_slots, records, "gather_slots")
    _check_code_slot(plan.reduce_slots, max((group.exchange_nbytes for group in groups), default=0), "reduce_slots")
    if plan.policy.micro_batches > 1 or plan.sum_slots.of_unit:
        summed = [sum_nbytes(unit, plan.policy.micro_batches) or None for unit in plan.units]
        _check_slots(plan.sum_slots, summed, plan.order, "sum_slots")
        for index in spread_units(plan.units, plan.order, plan.kept):
            slot = plan.sum_slots.of_unit[index]
            if slot is not None and plan.sum_slots.of_unit.count(slot) > 1:
                raise PlanError(
                    f"sum_slots.of_unit: unit {index} ({plan.units[index].label}) shares slot {slot}, but its "
                    "gradients come at several places of the backward"
                )


def _check_parameters(plan: Plan) -> None:
    """A parameter is in one place."""
    seen: set[str] = set()
    for _, group in plan.groups():
        for segment in group.layout.segments:
            if segment.name in seen:
                raise PlanError(f"units: parameter {segment.name!r} is in two places of the plan")
            seen.add(segment.name)


def _check_mesh(mesh: Mesh) -> None:
    if mesh.among(DATA) != DATA:
        raise PlanError(f"mesh: the axes {list(DATA)} are needed, of 1 rank where nothing is replicated or divided")
    places = [mesh.names.index(name) for name in mesh.summed]
    if places != sorted(places):
        raise PlanError(
            f"mesh: {mesh}: the axes that divide sequences and experts must come after the data axes {list(DATA)}"
        )
    built = (*DATA, *SEQUENCE, *MODEL_AXES)
    for axis in mesh.axes:
        if axis.name not in built and axis.size > 1:
            raise PlanError(
                f"mesh: axis {axis.name!r} has {axis.size} ranks, but nothing uses it; used axes are {list(built)}"
            )


def _check_unit(plan: Plan, unit: UnitPlan, path: str) -> None:
    over = plan.mesh.beside_data
    possible = ((*DATA, *over), (SHARD, *over), NESTED)
    if unit.axes not in possible:
        raise PlanError(
            f"{path}.axes must be {' or '.join(str(list(axes)) for axes in possible)}, not {list(unit.axes)}"
        )
    for number, group in enumerate(unit.groups):
        where, axes = f"{path}.groups[{number}]", unit.axes_of(group)
        _check_layout(group.layout, plan.mesh.size(axes), f"{where}.layout")
        _check_cuts(plan.mesh, group, f"{where}.layout")
        if group.update_axes not in ((), axes):
            raise PlanError(f"{where}.update_axes must be [] or the group's axes {list(axes)}")
        sums = tuple(axis for axis in plan.mesh.summed if axis not in group.model_axes)
        if group.trainable and group.sums != sums:
            raise PlanError(f"{where}.sums must be {list(sums)}: all their ranks read different data")
        if group.compressed and over:
            raise PlanError(
                f"{where}: 1-bit optimizers are not built on a mesh that divides sequences or experts ({plan.mesh})"
            )
        _check_second(plan, unit, group, where)
        _check_codes(group, where)
        _check_scaled(group, where)
        _check_differences(group, where)
        _check_hops(plan, unit, group, where)
        divided = any(placed is not None and placed.divided for placed in (group.param, group.grad))
        if group.trainable and divided and not group.update_axes:
            raise PlanError(f"{where}.update_axes must be {list(axes)} where parameters or gradients are divided")
        for kind in (StateKind.PARAM, StateKind.GRAD, StateKind.MASTER, StateKind.MOMENTS):
            placement = group.placement(kind)
            if placement is None:
                continue
            frozen_numbers = kind is StateKind.PARAM and not group.trainable and is_packed(placement.dtype)
            if not (kind is StateKind.MASTER and _is_split(group)) and not frozen_numbers:
                _check_dtype(placement.dtype, f"{where}.{kind.value}.dtype")
            if placement.axes not in ((), axes):
                raise PlanError(f"{where}.{kind.value}.axes must be [] or the group's axes {list(axes)}")
            if placement.copies < 1:
                raise PlanError(f"{where}.{kind.value}.copies must be 1 or more, is {placement.copies}")
            _check_blocks(group, kind, placement, f"{where}.{kind.value}")
        _check_state(plan.policy, unit, group, where)
        _check_tiers(plan.policy, group, where)
        if group.trainable:
            _check_dtype(group.wire, f"{where}.wire")
        if group.owners and len(group.owners) != len(group.layout.segments):
            raise PlanError(f"{where}.owners has {len(group.owners)} entries for {len(group.layout.segments)} segments")
        if any(not 0 <= owner < group.layout.shards for owner in group.owners):
            raise PlanError(f"{where}.owners names a rank that the axes {list(axes)} do not have")
        _check_factors(group, where)
        if group.trainable != (group.grad is not None):
            raise PlanError(f"{where}.grad must be there for a trainable group, and only for one")


def _check_factors(group: GroupPlan, path: str) -> None:
    """The factors of parameters that are updated from these are no larger than the parameters."""
    ranks, segments = group.factor_ranks, group.layout.segments
    if ranks and len(ranks) != len(segments):
        raise PlanError(f"{path}.factor_ranks has {len(ranks)} entries for {len(segments)} segments")
    for index, (rank, segment) in enumerate(zip(ranks, segments, strict=False)):
        most = min(matrix_shape(segment.shape)[1:]) if len(segment.shape) > 1 else 0
        if not min(1, most) <= rank <= most:
            raise PlanError(f"{path}.factor_ranks[{index}] is {rank}, of a parameter of shape {list(segment.shape)}")
    if ranks and group.second is not None:
        raise PlanError(
            f"{path}.factor_ranks: Dion does not sum factors where parameters have a second copy in each subgroup "
            "(zero_hpz_partition_size)"
        )


def _check_state(policy: ExecutionPolicy, unit: UnitPlan, group: GroupPlan, path: str) -> None:
    """The placements of a group's state fit each other, its unit, and what the optimizer computes."""
    in_parts = bool(unit.axes_of(group))  # else this rank holds all of what the model left to it
    if in_parts and group.param.divided != unit.sharded:
        raise PlanError(f"{path}.param.axes: the parameters of a unit are divided in all of its groups or in none")
    if in_parts and not group.param.divided and group.param.residency is Residency.AROUND_USE:
        raise PlanError(f"{path}.param.residency is 'around_use', but parameters that rest whole are always there")
    for kind in (StateKind.PARAM, StateKind.GRAD, StateKind.MASTER):
        placement = group.placement(kind)
        if placement is not None and placement.copies != 1:
            raise PlanError(f"{path}.{kind.value}.copies must be 1, is {placement.copies}")
    for kind in (StateKind.MASTER, StateKind.MOMENTS):
        placement = group.placement(kind)
        if placement is not None and placement.axes != group.update_axes:
            raise PlanError(f"{path}.{kind.value}.axes must be update_axes, {list(group.update_axes)}")
    own = state_dtype(group.param.dtype)
    if group.master is not None and group.master.dtype != own and not _is_split(group):
        raise PlanError(f"{path}.master.dtype must be {own!r}, or 'int16' beside bfloat16 parameters")
    themselves = group.master is None and group.param.dtype in LOW_PRECISION
    if group.moments is not None and group.moments.dtype != own and not themselves:
        raise PlanError(f"{path}.moments.dtype must be {own!r}, in which the optimizer computes")
    if group.grad is None:
        return
    if group.needs_reduce_slot and not group.staged and (policy.accumulate or group.grad.dtype != group.wire):
        raise PlanError(f"{path}.staged must be true where gradients are added up or kept in another dtype than 'wire'")
    kept = not group.grad.divided or group.grad.off_device or policy.accumulate
    if group.grad.residency is Residency.AROUND_USE and kept:
        what = "divided gradients on the device and one micro-batch per step"
        raise PlanError(f"{path}.grad.residency 'around_use' is for {what}")


def _check_second(plan: Plan, unit: UnitPlan, group: GroupPlan, path: str) -> None:
    """Second copies belong to the axes in nested order, and to nothing else."""
    wanted = SecondCopy((SHARD,), plan.mesh.size((SHARD,))) if unit.axes == NESTED else None
    if group.second != wanted:
        raise PlanError(f"{path}.second must be {wanted}, since the unit's axes are {list(unit.axes)}")
    summed_whole = group.trainable and not group.hops and (group.grad is None or not group.grad.divided)
    if wanted is not None and summed_whole:
        raise PlanError(f"{path}.second: a second copy in each subgroup needs gradients that are divided")
    if wanted is not None and group.owners:
        raise PlanError(
            f"{path}.owners: optimizers that work on whole matrices (Muon) can't exchange them where parameters have a "
            "second copy in each subgroup (zero_hpz_partition_size)"
        )


def _check_codes(group: GroupPlan, path: str) -> None:
    """Gathers in codes are for parameters that rest exactly in shards of whole blocks."""
    if group.codes is None:
        return
    if is_packed(group.param.dtype):
        raise PlanError(f"{path}.codes: {group.param.dtype} parameters hold packed or whole numbers, which codes round")
    if not group.param.divided:
        raise PlanError(f"{path}.codes: parameters that rest whole are not gathered in codes, which would round them")
    _check_record(group, group.codes, f"{path}.codes")


def _check_scaled(group: GroupPlan, path: str) -> None:
    """Parameters in fp8 need float32 master weights on the device."""
    scaled = group.param.dtype.startswith("float8") and group.trainable
    if not group.scaled and not scaled:
        return
    if not group.scaled or group.param.dtype != "float8_e4m3fn":
        raise PlanError(
            f"{path}.shown must name the dtype that the model sees of float8_e4m3fn parameters, and no other"
        )
    _check_dtype(group.shown, f"{path}.shown")
    if group.master is None or group.master.dtype != "float32" or group.master.off_device or group.param.off_device:
        raise PlanError(f"{path}: parameters in fp8 need float32 master weights on the device")
    if group.compressed or group.owners or group.factor_ranks or group.model_axes or group.codes or group.differences:
        raise PlanError(
            f"{path}: parameters in fp8 are updated element by element, gathered as they are, and not divided by the "
            "model"
        )


def _check_scales(plan: Plan) -> None:
    """All parameters in fp8 have scales of one kind, that of the products; one buffer has the scales of all."""
    wanted = None if plan.policy.products is None else plan.policy.products.scaling.block
    for index, unit in enumerate(plan.units):
        for number, group in enumerate(unit.groups):
            where, block = f"units[{index}].groups[{number}].scale_block", group.scale_block
            wanted = block if wanted is None and group.scaled else wanted
            expected = wanted if group.scaled else 0
            if block != expected:
                raise PlanError(f"{where} must be {expected}, as the scaling of policy.products has it, not {block}")
            for segment in group.layout.segments if block else ():
                if any(size % block for size in segment.shape):
                    raise PlanError(f"{where}: sizes of parameter {segment.name!r} are no multiples of {block}")


def _check_differences(group: GroupPlan, path: str) -> None:
    """Differences need a second copy that only steps change."""
    if group.differences is None:
        return
    if group.second is None or not group.param.divided or not group.trainable:
        what = "trained parameters that are divided and have a second copy in each subgroup (zero_hpz_partition_size)"
        raise PlanError(f"{path}.differences are for {what}")
    _check_record(group, group.differences, f"{path}.differences")


def _check_record(group: GroupPlan, blocks: Blocks, path: str) -> None:
    if group.param.dtype == "float64":
        raise PlanError(f"{path}: float64 parameters are not gathered in {blocks.bits}-bit codes; make them float32")
    problem = block_problem(blocks, group.layout.shard_numel)
    if problem is not None:
        raise PlanError(f"{path}: {problem}")


def _check_hops(plan: Plan, unit: UnitPlan, group: GroupPlan, path: str) -> None:
    """Quantized reduces need parts of whole blocks, and all ranks that hold a part of the gradients take part."""
    if not group.hops:
        return
    if not group.update_axes or group.compressed:
        what = "an optimizer that averages in compressed form" if group.compressed else "gradients that all ranks keep"
        raise PlanError(f"{path}.hops: {what} can't be summed in codes")
    if any(axis not in unit.axes for axis in group.sums):
        raise PlanError(f"{path}.hops: where subgroups hold copies of the state, gradients are not summed in codes")
    within = () if group.second is None else group.second.axes
    axes = (within, unit.axes[len(within) :]) if within else (unit.axes,)
    if tuple(hop.axes for hop in group.hops) != axes:
        raise PlanError(f"{path}.hops must go over {[list(one) for one in axes]}, one after the other")
    if group.wire == "float64":
        raise PlanError(f"{path}.hops: float64 gradients are not summed in codes, which keep 8 bits; make them float32")
    for number, (hop, size) in enumerate(zip(group.hops, group.hop_sizes, strict=True)):
        problem = block_problem(hop.blocks, size.landed)
        if problem is not None:
            raise PlanError(f"{path}.hops[{number}].blocks: {problem}")


def _is_split(group: GroupPlan) -> bool:
    """Whether master weights are the 16-bit remainder beside bfloat16 parameters (see optim.split_master)."""
    return group.master is not None and group.master.dtype == "int16" and group.param.dtype == "bfloat16"


def _check_blocks(group: GroupPlan, kind: StateKind, placement: Placement, path: str) -> None:
    """Blocks are for moments that the device updates, and no block may straddle parameters or ranks."""
    if placement.blocks is None:
        return
    size, layout = placement.blocks.size, group.layout
    if kind is not StateKind.MOMENTS or group.update is HostUpdate.PROCESSOR:
        raise PlanError(f"{path}.blocks: only moments are kept in blocks, and the processor can't update them")
    borders = [layout.shard_numel, *(border for segment in layout.segments for border in (segment.offset, segment.end))]
    if any(border % size for border in borders):
        raise PlanError(f"{path}.blocks.size {size} does not divide where parameters and shards begin and end")


def _check_layout(layout: FlatLayout, shards: int, path: str) -> None:
    if layout.shards != shards:
        raise PlanError(f"{path}.shards is {layout.shards}, but the unit's axes have {shards} ranks")
    if layout.numel < 0 or layout.numel % shards:
        raise PlanError(f"{path}.numel {layout.numel} does not divide by {shards} ranks")
    position = 0
    for index, segment in enumerate(layout.segments):
        if any(size < 0 for size in segment.shape):
            raise PlanError(f"{path}.segments[{index}].shape {segment.shape} has a negative size")
        if segment.offset < position or segment.end > layout.numel:
            raise PlanError(f"{path}.segments[{index}] ({segment.name!r}) overlaps another or the end of the buffer")
        position = segment.end


def _check_cuts(mesh: Mesh, group: GroupPlan, path: str) -> None:
    """The parameters of a group are divided over the same axes of the mesh, or none of them is."""
    segments = group.layout.segments
    for index, segment in enumerate(segments):
        cut, where = segment.cut, f"{path}.segments[{index}].cut"
        if (cut is None) != (segments[0].cut is None) or len(group.model_axes) > 1:
            raise PlanError(f"{where}: all parameters of a group are divided over the same axis, or none of them is")
        if cut is None:
            continue
        if cut.axis not in mesh.among(MODEL_AXES) or mesh.size((cut.axis,)) != cut.ranks:
            raise PlanError(f"{where} is over {cut.ranks} ranks of {cut.axis!r}, which the mesh ({mesh}) does not have")
        if not 0 <= cut.dim < len(segment.shape) or cut.blocks < 1 or segment.shape[cut.dim] % cut.blocks:
            raise PlanError(f"{where} is along dim {cut.dim} in {cut.blocks} blocks, of shape {list(segment.shape)}")
    if group.model_axes and group.compressed:
        raise PlanError(
            f"{path}: 1-bit optimizers do not average parameters that the model divides ({segments[0].name})"
        )
    if group.model_axes and group.moments is not None and group.moments.blocks is not None:
        raise PlanError(f"{path}: moments in few bits are not built for parameters that the model divides")


def _check_tiers(policy: ExecutionPolicy, group: GroupPlan, path: str) -> None:
    """State that rests off the device needs a way to update it, and to move it there and back."""
    if group.param.off_device and (not group.param.divided or group.param.residency is Residency.RESIDENT):
        raise PlanError(
            f"{path}.param.tier is '{group.param.tier.value}', which needs parameters that are sharded and gathered "
            "around use"
        )
    held = (group.master, group.moments) if group.master is not None or group.moments is not None else (group.param,)
    off_device = group.trainable and any(one is not None and one.off_device for one in held)
    if group.param.off_device and group.trainable and not off_device:
        raise PlanError(f"{path}.param.tier is '{group.param.tier.value}', which needs the optimizer's state there too")
    if off_device != (group.update is not None):
        raise PlanError(f"{path}.update must say how state off the device is updated, and be null where there is none")
    if off_device and not group.update_axes:
        raise PlanError(f"{path}: state off the device needs update_axes")
    if group.update is HostUpdate.STREAMED and policy.stream_numel < 1:
        raise PlanError(f"policy.stream_numel must be above 0, is {policy.stream_numel}")
    if group.passes_windows and policy.window_numel < 1:
        raise PlanError(f"policy.window_numel must be above 0, is {policy.window_numel}")
    if group.grad_off_device and not (group.updated_off_device and group.staged and not policy.accumulate):
        raise PlanError(
            f"{path}.grad.tier is '{group.grad.tier.value if group.grad else None}', which needs state off the device, "
            "staged gradients and one micro-batch per step"
        )


def _check_slots(slots: SlotPlan, needed: Sequence[int | None], order: Sequence[int], path: str) -> None:
    """`needed` is bytes per unit, None for a unit that needs no slot."""
    if len(slots.of_unit) != len(needed):
        raise PlanError(f"{path}.of_unit has {len(slots.of_unit)} entries for {len(needed)} units")
    if any(nbytes < 0 for nbytes in slots.nbytes):
        raise PlanError(f"{path}.nbytes has a negative size")
    for unit, (slot, nbytes) in enumerate(zip(slots.of_unit, needed, strict=True)):
        if (slot is None) != (nbytes is None):
            raise PlanError(f"{path}.of_unit[{unit}] is {slot}, but the unit {'needs one' if nbytes else 'needs none'}")
        if nbytes is not None and unit not in order:
            raise PlanError(f"order leaves out unit {unit}, which must be gathered or reduced")
        if slot is not None and not (0 <= slot < len(slots.nbytes) and slots.nbytes[slot] >= (nbytes or 0)):
            raise PlanError(f"{path}.of_unit[{unit}] is {slot}, which is no slot of {nbytes} bytes or more")


def _check_shared_slots(plan: Plan) -> None:
    """No gather overwrites a unit in use: units in one slot are more than the prefetch distance apart."""
    slots, once = plan.gather_slots.of_unit, [unit for unit in dict.fromkeys(plan.order) if plan.units[unit].sharded]
    last: dict[int, tuple[int, int]] = {}
    for position, unit in enumerate(once):
        slot = slots[unit]
        assert slot is not None
        before, at = last.get(slot, (None, 0))
        last[slot] = unit, position
        if before is None:
            continue
        for one in (before, unit):
            if not plan.units[one].name or one in plan.kept:
                raise PlanError(
                    f"gather_slots.of_unit: units {before} and {unit} share slot {slot}, but unit {one} "
                    f"({plan.units[one].label}) stays gathered for whole passes and needs a slot of its own"
                )
        if position - at <= plan.policy.prefetch:
            raise PlanError(
                f"gather_slots.of_unit: units {before} and {unit} share slot {slot}, but follow each other within "
                f"policy.prefetch ({plan.policy.prefetch})"
            )


def _check_code_slot(slots: SlotPlan, nbytes: int, path: str) -> None:
    """The last slot is for codes alone where there are codes."""
    last = len(slots.nbytes) - 1
    if nbytes and (last < 0 or slots.nbytes[last] < nbytes or last in slots.of_unit):
        raise PlanError(f"{path}.nbytes needs a last slot of {nbytes} bytes or more for codes, which no unit uses")


def _check_dtype(name: str, path: str) -> None:
    try:
        canonical = dtype_name(name)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    if canonical != name:
        raise PlanError(f"{path}: write {canonical!r} for {name!r}")


def peer_problem(plan: Plan) -> str | None:
    """Why the plan can't run by copies between peers; None where it can."""
    groups = [(unit, group) for unit, group in plan.groups() if group.layout.shards > 1]
    if not groups:
        return "nothing is sent"
    if len({unit.axes_of(group) for unit, group in groups}) > 1:
        return "units are sharded over different axes"
    if any(group.second is not None for _, group in groups):
        return "parameters have a second copy in each subgroup"
    if any(group.codes is not None for _, group in groups):
        return "parameters are gathered in codes"
    if any(group.hops for _, group in groups):
        return "gradients are summed in codes"
    if any(group.param.off_device for _, group in groups):
        return "parameters rest off the device"
    if plan.mesh.beside_data or any(plan.mesh.size((axis,)) > 1 for axis in plan.mesh.among(MODEL_AXES)):
        return "the mesh has axes beside those of data"
    trainable = [group for _, group in groups if group.trainable]
    if any(not group.update_axes for group in trainable):
        return "every rank updates all parameters (stage 0)"
    if any(group.wire == "float64" for group in trainable):
        return "gradients travel in float64"
    if plan.policy.predivide != 1.0:
        return "gradients are divided before they are summed (predivide)"
    return None

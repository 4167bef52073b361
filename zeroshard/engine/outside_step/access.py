"""Reads and writes of single parameters, gradients and optimizer states while they are sharded: DeepSpeed's `safe_*`.

              rank 0              rank 1
    master    [ a a a a b b | b b b c c . ]        full:   the parameter in its shape, equal on all ranks
    local b         [ b b ]   [ b b b ]            local:  the elements that this rank updates, flat, in order

A full value is assembled in separate memory without rounding: each rank writes its elements into zeros, and the ranks
sum them as integers. Only one parameter is whole at a time; gathering the flat group would need the memory of a whole
unit. Unless a function says otherwise all ranks call it, in the same order; a call on one rank alone ends in a
DivergenceError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroshard.engine.core.autograd import in_backward
from zeroshard.engine.core.handle import Handle
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.rank_values import is_divided, rank_part, read_values, write_parameter, write_values
from zeroshard.engine.memory.unit import Unit
from zeroshard.engine.memory.update_view import update_grad
from zeroshard.engine.outside_step.disk_errors import report_disk_errors
from zeroshard.engine.outside_step.gathered import own_part, place_of, whole_value
from zeroshard.engine.step.attached import stepper_of
from zeroshard.errors import UsageError
from zeroshard.optim.saved_state import PackedState, StatePart
from zeroshard.plan.legs import replica_axes
from zeroshard.sharding.layout import Segment
from zeroshard.tiers import RowPart

_NONE, _PRESENT, _UNKNOWN = 0, 1, 2
"""A rank's answer about an optimizer state: not there (yet), present, or unknown to the optimizer."""


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """The whole parameter in float32, from its master weights where there are some; called by all ranks.

    Returns:
        A copy in the parameter's full shape, on the device of the state; in float64 of a float64 parameter.

    Raises:
        UsageError: the tensor is not a parameter of a sharded model. So do all functions of this file.
    """
    spot = _spot(param)
    return spot.full(_fp32_part(spot))


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """The elements of the parameter that this rank updates, flat, float32, as a copy; may be called on one rank."""
    return _fp32_part(_spot(param)).clone()


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Give the parameter rank 0's `value`; called by all ranks, between steps.

    Master weights take it in float32, the parameter in its dtype, and the next forward and step see it.

    Args:
        value: a tensor of the parameter's full shape, any dtype and device.

    Raises:
        UsageError: another shape, during a backward, or inside GatheredParameters of this parameter.
    """
    spot = _spot(param)
    spot.check_writable("safe_set_full_fp32_param")
    whole = spot.from_rank_0(value, "safe_set_full_fp32_param")
    spot.handle.runtime.parameters.before_write()
    with torch.no_grad(), report_disk_errors(spot.handle):
        write_parameter(spot.group, spot.index, whole)
    spot.handle.runtime.parameters.mark_written(())


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Give this rank's elements of the parameter a value of their own; called by all ranks, between steps.

    Args:
        value: as many elements as `safe_get_local_fp32_param` returns, any dtype and device.
    """
    spot = _spot(param)
    spot.check_writable("safe_set_local_fp32_param")
    part = spot.local_value(value, "safe_set_local_fp32_param")
    runtime = spot.handle.runtime
    runtime.parameters.before_write()
    with torch.no_grad(), report_disk_errors(spot.handle):
        write_values(spot.group, spot.own, part)
    in_parts = not spot.group.plan.param.divided and spot.divided
    runtime.parameters.mark_written((spot.unit.index,) if in_parts else ())
    if in_parts:
        runtime.parameters.gather(spot.unit.index)  # the unit rests whole, so all ranks need all parts
        runtime.parameters.issue_peer_barrier()
        runtime.parameters.wait_for_gathers()


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The whole gradient of the backwards since the last step; called by all ranks, between backward and step.

    Returns:
        A float32 copy in the parameter's full shape: averaged over the ranks, without the loss scale, before clipping.
        None where no rank has a gradient for it.
    """
    spot = _spot(param)
    part = _read_grad(spot)
    return None if part is None else spot.full(part)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient of the elements that this rank updates, flat, float32; otherwise as `safe_get_full_grad`."""
    return _read_grad(_spot(param))


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Give the parameter's gradient rank 0's `value`; called by all ranks, between backward and step.

    Args:
        value: of the parameter's full shape, in the unit of `safe_get_full_grad`. The next step clips and uses it;
            later micro-batches are added to it.

    Raises:
        UsageError: there are no gradients to set, or the parameter is frozen.
    """
    spot = _spot(param)
    _check_gradients(spot, "safe_set_full_grad")
    _write_grad(spot, spot.from_rank_0(value, "safe_set_full_grad"))


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Give the gradient of this rank's elements a value of their own; as `safe_set_full_grad` otherwise."""
    spot = _spot(param)
    _check_gradients(spot, "safe_set_local_grad")
    _write_grad(spot, spot.assemble(spot.local_value(value, "safe_set_local_grad")))


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """One state of the optimizer for the whole parameter (`exp_avg`, say); called by all ranks.

    Returns:
        A copy in the parameter's full shape; None where there is none: for a frozen parameter, for one that the
        optimizer does not have, and before the first step of an optimizer that makes its state then.

    Raises:
        UsageError: the optimizer has no state of that name, or none by element.
    """
    spot = _spot(param)
    part = _state(spot, optim_state_key)
    return None if part is None else spot.full(_read(spot, part))


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """One state of the optimizer for the elements that this rank updates, flat; called by all ranks."""
    spot = _spot(param)
    part = _state(spot, optim_state_key)
    return None if part is None else _read(spot, part).clone()


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Give one state of the optimizer rank 0's `value`, of the parameter's full shape; called by all ranks.

    Raises:
        UsageError: the parameter has no such state (yet).
    """
    spot = _spot(param)
    part = _existing_state(spot, optim_state_key)
    whole = spot.from_rank_0(value, "safe_set_full_optimizer_state")
    with torch.no_grad(), report_disk_errors(spot.handle):
        part.write(whole.reshape(-1)[spot.of_whole])


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Give one state of this rank's elements of the parameter a value of their own; called by all ranks."""
    spot = _spot(param)
    part = _existing_state(spot, optim_state_key)
    own = spot.local_value(value, "safe_set_local_optimizer_state")
    with torch.no_grad(), report_disk_errors(spot.handle):
        part.write(own)


@dataclass(frozen=True)
class _Spot:
    """A parameter's place in the sharded state of this rank.

    Attributes:
        own: its elements that this rank updates, within the flat tensor that this rank updates.
        of_whole: the same elements, within the parameter.
        divided: whether ranks update different elements.
    """

    handle: Handle
    unit: Unit
    group: Group
    index: int
    param: torch.Tensor
    own: slice
    of_whole: slice
    divided: bool

    @property
    def segment(self) -> Segment:
        return self.group.plan.layout.segments[self.index]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of values that callers get and give: float32, or the parameter's dtype if that is wider."""
        return torch.promote_types(self.group.dtype, torch.float32)

    @property
    def number(self) -> int:
        """The group's number among the trainable ones of its unit."""
        return next(number for number, group in enumerate(self.unit.trainable) if group is self.group)

    def assemble(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, flat, of every rank's `part`, exactly; a copy on the device."""
        part = part.to(self.handle.device)
        if not self.divided:
            return part.clone()
        wide = part if part.dtype.itemsize in (4, 8) else part.float()
        whole = wide.new_zeros(self.segment.numel)
        whole[self.of_whole] = wide
        self._sum(whole.view(torch.int32 if wide.dtype.itemsize == 4 else torch.int64))
        return whole.to(part.dtype)

    def full(self, part: torch.Tensor) -> torch.Tensor:
        """The parameter's whole value in its shape, from every rank's `part`; as `assemble` does it."""
        return whole_value(self.handle, self.segment, self.assemble(part))

    def _sum(self, whole: torch.Tensor) -> None:
        comm = self.handle.comm
        label = f"{self.segment.name} (safe_get_full_fp32_param or its kin)"
        comm.log.record("get", label, whole.nbytes)
        gathers = comm.gathers[self.unit.plan.axes_of(self.group.plan)]
        gathers.wait(gathers.all_reduce(whole, label))

    def agree(self, code: int, call: str) -> int:
        """The largest of the ranks' codes; error messages name `call` if some ranks do not make it."""
        codes = torch.tensor([code], dtype=torch.int64, device=self.handle.device)
        control = self.handle.comm.control
        control.wait(control.all_reduce(codes, f"{self.segment.name} ({call})", op=dist.ReduceOp.MAX))
        return int(codes)

    def from_rank_0(self, value: torch.Tensor, call: str) -> torch.Tensor:
        """Rank 0's value as a flat copy in `dtype` on the state's device; this rank's part if the model divides it.

        A flag with the value says whether it is valid, since a rank that raises alone would leave the others waiting.
        """
        control, name = self.handle.comm.control, self.segment.name
        shape = self.segment.whole_shape
        problem = _problem(value, math.prod(shape), f"{tuple(shape)}")
        sent = torch.zeros(math.prod(shape) + 1, dtype=self.dtype, device=self.handle.device)
        if control.rank == 0 and problem is None:
            sent[:-1] = value.detach().reshape(-1)
            sent[-1] = 1
        control.wait(control.broadcast(sent, 0, f"{name} ({call})"))
        if problem is None and not bool(sent[-1]):
            problem = "can't be set: the value of rank 0 is not valid, see its error"
        if problem is not None:
            raise UsageError(f"{call}: {name!r} {problem}")
        return own_part(self.handle, self.segment, sent[:-1])

    def local_value(self, value: torch.Tensor, call: str) -> torch.Tensor:
        """This rank's value, flat; if several ranks update the same elements, the value of the first one."""
        if not self.divided and self.segment.cut is None:
            return self.from_rank_0(value, call)
        count = self.own.stop - self.own.start
        problem = _problem(value, count, f"({count},) on this rank")
        # A rank that raises alone would leave the others waiting in the next collective.
        if self.agree(int(problem is not None), call) and problem is None:
            problem = "can't be set: the value of another rank is not valid, see its error"
        if problem is not None:
            raise UsageError(f"{call}: {self.segment.name!r} {problem}")
        part = value.detach().to(self.handle.device, self.dtype, copy=True).reshape(-1).contiguous()
        comm = self.handle.comm
        comm.log.record("set", self.segment.name, 0)
        divided = self.unit.plan.axes_of(self.group.plan) if self.divided else ()
        copies = self.handle.plan.mesh.without((*divided, *self.group.plan.model_axes))
        if copies:
            replicas = comm.gathers[copies]
            replicas.wait(replicas.broadcast(part, 0, self.segment.name))
        return part

    def check_writable(self, call: str) -> None:
        sharded = self.group.plan.param.divided
        if in_backward():
            raise UsageError(f"{call} during a backward: call it after the step, before the next forward")
        if sharded and self.param.numel() and not self.unit.in_use:
            raise UsageError(
                f"{call} inside GatheredParameters of {self.segment.name!r}: change the parameter itself there, or "
                "call this outside"
            )


def _spot(param: torch.Tensor) -> _Spot:
    place = place_of(param) if isinstance(param, torch.Tensor) else None
    if place is None:
        raise UsageError(
            "the tensor is not a parameter of a sharded model; take it from model.parameters() after shard() or "
            "initialize()"
        )
    handle, unit, group, index = place
    handle.runtime.drain()
    own, of_whole = rank_part(group, index)
    return _Spot(handle, unit, group, index, param, own, of_whole, is_divided(group))


def _problem(value: object, numel: int, shape: str) -> str | None:
    """Why a value is not valid; None if it is."""
    if not isinstance(value, torch.Tensor) or value.numel() != numel:
        given = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        return f"needs a tensor of shape {shape}, got {given}"
    if value.is_meta:
        return "needs a tensor of real numbers, got one on the meta device, which has no values"
    if value.is_complex():
        return f"needs a tensor of real numbers, got {value.dtype}"
    return None if value.layout is torch.strided else f"needs a dense tensor, got one of layout {value.layout}"


def _read(spot: _Spot, part: PackedState) -> torch.Tensor:
    with report_disk_errors(spot.handle):
        return part.read()


def _fp32_part(spot: _Spot) -> torch.Tensor:
    with report_disk_errors(spot.handle):
        values = read_values(spot.group, spot.own, None if spot.group.master is None else spot.handle.device)
    return values.to(spot.dtype)


def _read_grad(spot: _Spot) -> torch.Tensor | None:
    """The gradient of this rank's elements: the reduced part, plus the sum of pending local gradients."""
    gradients = spot.handle.runtime.gradients
    if not spot.group.plan.trainable or not gradients.present:
        return None
    received = int(gradients.received(spot.unit)[spot.number][spot.index])
    if spot.agree(received, "safe_get_full_grad or its kin") == 0:
        return None
    part = torch.zeros(spot.own.stop - spot.own.start, dtype=spot.dtype, device=spot.handle.device)
    if spot.unit.gradients.reduced:
        part += update_grad(spot.group)[spot.own].to(part.device, spot.dtype)
    if spot.unit.gradients.local:
        part += _sum_of_pending(spot)[spot.of_whole]
    return part * stepper_of(spot.handle.runtime.model).unscale()


def _sum_of_pending(spot: _Spot) -> torch.Tensor:
    """The sum over ranks of pending local gradients, flat; they stay pending."""
    comm, axes = spot.handle.comm, spot.unit.plan.axes_of(spot.group.plan)
    local = spot.handle.runtime.gradients.local(spot.group)[spot.segment.offset : spot.segment.end]
    summed = local.to(spot.dtype) / spot.handle.plan.policy.predivide
    comm.log.record("get", spot.segment.name, summed.nbytes)
    for over in (axes, replica_axes(spot.unit.plan, spot.group.plan)):
        if over:
            comm.reduces[over].wait(comm.reduces[over].all_reduce(summed, spot.segment.name))
    return summed


def _check_gradients(spot: _Spot, call: str) -> None:
    if not spot.group.plan.trainable:
        raise UsageError(f"{call}: {spot.segment.name!r} is frozen, so it has no gradient")
    if in_backward() or not spot.handle.runtime.gradients.present:
        raise UsageError(f"{call}: there is no gradient to set; call it after the backward and before the step")


def _write_grad(spot: _Spot, whole: torch.Tensor) -> None:
    """Set the whole gradient to `whole` (averaged, unscaled), in the buffer that the next step or reduce reads."""
    gradients, group = spot.handle.runtime.gradients, spot.group
    stepper = stepper_of(spot.handle.runtime.model)
    summed = whole / stepper.unscale()
    if spot.unit.gradients.local:
        local = gradients.local(group)[spot.segment.offset : spot.segment.end]
        mesh = spot.handle.plan.mesh
        first = mesh.position(spot.handle.comm.mesh.rank, spot.group.plan.sums) == 0
        local.copy_(summed * spot.handle.plan.policy.predivide if first else torch.zeros_like(summed))
        summed = torch.zeros_like(summed)
    if spot.unit.gradients.reduced:
        update_grad(group)[spot.own].copy_(summed[spot.of_whole])
        gradients.squares.changed(group)
    gradients.received(spot.unit)[spot.number][spot.index] = True
    stepper.gradients_changed()


def _state(spot: _Spot, key: str) -> PackedState | None:
    """This rank's part of a state. All ranks agree on its existence, since ranks without elements can't know it."""
    update = stepper_of(spot.handle.runtime.model).update
    part: PackedState | None = None
    names: tuple[str, ...] = ()
    code = _NONE
    if spot.group.plan.trainable:
        region = _region_number(spot)
        parts = list(update.state_parts())
        known = update.value_keys(region)
        names = known if known is not None else tuple(dict.fromkeys(name for one in parts for name in one.elements))
        mine = (one for one in parts if (one.region, one.index) == (region, spot.index))
        part = next((_values(one, key) for one in mine), None)
        code = _PRESENT if part is not None else _UNKNOWN if names and key not in names else _NONE
    code = spot.agree(code, "safe_get_full_optimizer_state or its kin")
    if code == _UNKNOWN:
        raise UsageError(f"the optimizer has no state {key!r:.80}; it has {', '.join(names) or 'none here'}")
    if code == _NONE:
        return None
    return part if part is not None else _plain(RowPart.of(torch.empty(0, device=spot.handle.device)))


def _values(part: StatePart, key: str) -> PackedState | None:
    """A part's elements of a state; None if it has none."""
    elements = part.elements.get(key)
    return part.packed.get(key) if elements is None else _plain(elements)


def _plain(elements: RowPart) -> PackedState:
    return PackedState(elements.values, elements.store, {})


def _existing_state(spot: _Spot, key: str) -> PackedState:
    part = _state(spot, key)
    if part is None:
        raise UsageError(
            f"{spot.segment.name!r} has no {key!r} to set: it is frozen, not one of the optimizer's parameters, or has "
            "not been updated yet; call it after the first step"
        )
    return part


def _region_number(spot: _Spot) -> int:
    """The number of the group's region: regions are the trainable groups of all units in order."""
    number = 0
    for unit in spot.handle.runtime.units:
        for group in unit.trainable:
            if group is spot.group:
                return number
            number += 1
    raise AssertionError(spot.segment.name)

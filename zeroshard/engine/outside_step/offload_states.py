"""`offload_states` and `reload_states`: free the device's memory for a while, for example for generation.

Between the two calls training and reading of state raise an error. The calls move this rank's optimizer state, master
weights, compute-dtype parameters and accumulated gradients; slots stay, and so does state in host memory. Parameters in
peer memory stay, too, because the peers use their addresses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum

import torch
from torch import nn

from zeroshard.engine.core.handle import Handle, handle_of
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.parking import Parkable
from zeroshard.engine.step.attached import find_stepper
from zeroshard.errors import UsageError
from zeroshard.plan.report import human_bytes
from zeroshard.tiers import values_of

_LOGGER = logging.getLogger("zeroshard")
_ALIASES = {"contiguous_grad_buffer": Parkable.LP_GRADS.value}


def offload_states(
    model: nn.Module,
    include: Iterable[str] | None = None,
    device: str = "cpu",
    *,
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> int:
    """Move state out of the device's memory until `reload_states`; called by all ranks, between steps.

    Args:
        include: some of optim_states, hp_params, lp_params, lp_grads (or DeepSpeed's enum members of these names); None
            for all that can be moved.
        device: "cpu".
        pin_memory: use pinned host memory, from which the reload is faster.
        non_blocking: accepted, without effect: the copies are complete when this returns.

    Returns:
        Bytes moved on this rank.

    Raises:
        UsageError: an unknown name or device, parameters that can't be moved, or state that is offloaded already.
    """
    handle = handle_of(model)
    runtime = handle.runtime
    if str(getattr(device, "value", device)) != "cpu":
        raise UsageError(f"offload_states(device={device!r}): state can go to 'cpu' only")
    kinds = set(Parkable) if include is None else {_kind(name) for name in include}
    if Parkable.LP_PARAMS in kinds and runtime.peers is not None:
        if include is not None:
            raise UsageError(
                "offload_states: lp_params can't go where ranks copy parameters from each other's memory; leave them "
                "out, or shard with Recipe(peer_copies=False)"
            )
        kinds.discard(Parkable.LP_PARAMS)
        _LOGGER.info("offload_states: parameters in compute dtype stay, for the other ranks copy from them")
    runtime.drain()
    moved = 0
    for kind in sorted(kinds):
        moved += runtime.parking.park(kind, _tensors(handle, model, kind), pin_memory=pin_memory)
    if Parkable.LP_PARAMS in kinds:
        _show_whole(handle, whole=False)
    _LOGGER.info("offload_states: %s moved to host memory", human_bytes(moved))
    return moved


def reload_states(model: nn.Module, *, non_blocking: bool = False) -> int:
    """Move back the state that `offload_states` moved, if any. Returns the bytes moved.

    Args:
        non_blocking: accepted, without effect.
    """
    handle = handle_of(model)
    parked = handle.runtime.parking.kinds
    moved = handle.runtime.parking.reload()
    if Parkable.LP_PARAMS in parked:
        _show_whole(handle, whole=True)
    handle.runtime.gradients.forget_addresses()
    stepper = find_stepper(model)
    if stepper is not None and parked:
        stepper.gradients_changed()
    return moved


def _kind(name: str) -> Parkable:
    text = str(name.value) if isinstance(name, Enum) else name
    text = _ALIASES.get(text, text)
    try:
        return Parkable(text)
    except ValueError as error:
        known = ", ".join(kind.value for kind in Parkable)
        raise UsageError(f"offload_states(include={text!r}): there are {known}") from error


def _tensors(handle: Handle, model: nn.Module, kind: Parkable) -> list[torch.Tensor]:
    """The tensors of a kind that rest on the device."""
    groups = [group for unit in handle.runtime.units for group in unit.groups]
    if kind is Parkable.OPTIM_STATES:
        stepper = find_stepper(model)
        tensors = stepper.update.tensors().values() if stepper is not None else ()
        return [tensor for tensor in tensors if tensor.device == handle.device]
    if kind is Parkable.HP_PARAMS:
        return [
            values_of(g.master)
            for g in groups
            if g.master is not None and g.plan.master and not g.plan.master.off_device
        ]
    if kind is Parkable.LP_GRADS:
        resting = [group.grad for group in groups if group.grad is not None and not group.plan.grad_off_device]
        return resting + [group.local for group in groups if group.local is not None]
    seconds = [group.second for group in groups if group.second is not None and not _rests_whole(group)]
    whole = [group.whole if _rests_whole(group) else group.shard for group in groups if not group.plan.param.off_device]
    return whole + seconds


def _rests_whole(group: Group) -> bool:
    return not group.plan.param.divided


def _show_whole(handle: Handle, *, whole: bool) -> None:
    """Show or hide the values of parameters that rest whole, since views of freed memory must not be read."""
    for unit in handle.runtime.units:
        for group in unit.groups:
            if whole:
                group.note_views()  # the memory came back at other addresses
            if _rests_whole(group):
                group.show() if whole else group.hide()

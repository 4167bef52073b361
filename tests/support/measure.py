"""Measures what a sharded model really holds and sends, to be compared with what its plan says."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.memory.group import Group
from zeroshard.engine.step.attached import stepper_of
from zeroshard.plan.memory import StateBytes
from zeroshard.plan.placement import Tier
from zeroshard.plan.traffic import Traffic
from zeroshard.tiers import values_of


def held_bytes(model: nn.Module) -> StateBytes:
    """Bytes of the distinct storages behind each kind of state of `model` on this rank."""
    runtime = handle_of(model).runtime
    groups = [group for unit in runtime.units for group in unit.groups]
    regions = [group for unit in runtime.units for group in unit.trainable]
    states = stepper_of(model).update.tensors().items()
    return StateBytes(
        param=_nbytes(
            group.shard if group.plan.param.divided else group.whole
            for group in groups
            if not group.plan.param.off_device
        )
        + _nbytes(group.second for group in groups if group.plan.param.divided)
        + _nbytes(() if runtime.parameters.scaled is None else runtime.parameters.scaled.scales),
        grad=_nbytes(group.grad for group in groups if not group.plan.grad_off_device)
        + _nbytes(error for group in groups for error in group.errors),
        master=_nbytes(
            values_of(g.master)
            for g in groups
            if g.master is not None and not (g.plan.master and g.plan.master.off_device)
        ),
        moments=_nbytes(
            tensor
            for name, tensor in states
            if tensor.dim() and not name.endswith("steps") and not _on_host(name, regions)
        ),
        gather_slots=_nbytes(runtime.storage.gather_slots),
        at_rest=_nbytes(empty for group in groups for empty in group.empties),
        reduce_slots=_nbytes(runtime.storage.reduce_slots),
        sum_slots=_nbytes(runtime.storage.sum_slots),
        no_sync=_nbytes(group.local for group in groups),
        state_buffers=_nbytes(stepper_of(model).state_buffers),
        host=runtime.storage.tiers[Tier.HOST].used if Tier.HOST in runtime.storage.tiers else 0,
    )


def _on_host(name: str, regions: Sequence[Group]) -> bool:
    """Whether the state of this name ("3.exp_avg") is of a region whose moments rest in host memory."""
    number = name.partition(".")[0]
    moments = regions[int(number)].plan.moments if number.isdigit() and int(number) < len(regions) else None
    return moments is not None and moments.tier is Tier.HOST


def live_bytes(expected: int) -> int:
    """Bytes of the distinct storages behind all tensors in this process that came after `gc.freeze()`.

    A gloo thread lets go of a tensor a moment after its collective has completed, so more than `expected` is measured
    again for two seconds.
    """
    deadline = time.monotonic() + 2.0
    while (found := _live_bytes()) > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _live_bytes() -> int:
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return _nbytes(tensor for tensor in tensors if not tensor.is_meta and tensor.layout is torch.strided)


def sent(model: nn.Module) -> Traffic:
    """What the process groups were given since the last `forget_sent`."""
    handle_of(model).runtime.drain()
    totals = handle_of(model).comm.sent.totals()
    return Traffic(
        {kind: calls for kind, (calls, _) in totals.items()}, {kind: nbytes for kind, (_, nbytes) in totals.items()}
    )


def forget_sent(model: nn.Module) -> None:
    """Count from here on."""
    handle_of(model).runtime.drain()
    handle_of(model).comm.sent.reset_totals()


def _nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(_storages(tensor for tensor in tensors if tensor is not None).values())


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    with torch._C.DisableTorchFunctionSubclass():  # stand-ins for sharded gradients refuse to be looked at
        storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def saved_numel(forward: Callable[[], object]) -> int:
    """Elements of the activations that `forward` keeps for its backward; parameters and views are not counted."""
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(0 if isinstance(tensor, nn.Parameter) or tensor._is_view() else tensor.numel())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(saved)

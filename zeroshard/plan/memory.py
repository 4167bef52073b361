"""Computes the bytes that a plan takes on one rank, by kind of state and tier; exact, with padding and slots."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.factors import factor_buffers
from zeroshard.plan.groups import GroupPlan
from zeroshard.plan.matrices import exchange_buffers
from zeroshard.plan.offload import disk_nbytes, host_nbytes, stream_buffer_nbytes
from zeroshard.plan.placement import StateKind, Tier
from zeroshard.plan.plan import Plan

_ALIGNMENT = 64  # of the parts in the copy, as checkpoint/staging.py lays them


@dataclass(frozen=True)
class StateBytes:
    """Bytes per rank: resting state by kind, and the slots of gathers and reduces."""

    param: int
    """With second copies in subgroups."""
    grad: int
    """With the rounding errors of quantized gradients."""
    master: int
    moments: int
    gather_slots: int
    reduce_slots: int
    no_sync: int
    """Whole local gradients; allocated when a backward first runs under no_sync with sharded gradients."""
    state_buffers: int = 0
    """Device buffers for streamed updates of state in host memory."""
    host: int = 0
    """Host memory, with the windows for state on disk."""
    disk: int = 0
    """Files; everything without another tier in its name is on the device."""
    at_rest: int = 0
    """One element of each dtype of parameters, which is the data of resting parameters."""
    sum_slots: int = 0
    """Sums of gradients over the micro-batches that pass a unit in turn."""
    step: int = 0
    """Buffers that exist only in a step: of whole matrices (Muon), on the rank with the most, and of factors (Dion)."""

    @property
    def state(self) -> int:
        """Parameters, gradients, master and moments on the device: the state of the papers' formulas."""
        return self.param + self.grad + self.master + self.moments

    @property
    def total(self) -> int:
        """Device memory: state, slots and buffers; without `no_sync` and `step`."""
        slots = self.gather_slots + self.reduce_slots + self.sum_slots
        return self.state + slots + self.state_buffers + self.at_rest


def state_bytes(plan: Plan) -> StateBytes:
    """What one rank holds under `plan`, in bytes. Every rank holds the same."""
    kinds = {kind: sum(group.held_on(Tier.DEVICE, kind) for _, group in plan.groups()) for kind in StateKind}
    no_sync = sum(
        group.layout.numel * max(itemsize(group.grad.dtype), itemsize(group.wire))
        for _, group in plan.groups()
        if group.grad is not None and group.grad.divided
    )
    return StateBytes(
        param=kinds[StateKind.PARAM] + sum(group.second_nbytes for _, group in plan.groups()),
        grad=kinds[StateKind.GRAD] + sum(group.errors_nbytes for _, group in plan.groups()),
        master=kinds[StateKind.MASTER],
        moments=kinds[StateKind.MOMENTS],
        gather_slots=plan.gather_slots.total_nbytes,
        reduce_slots=plan.reduce_slots.total_nbytes,
        sum_slots=plan.sum_slots.total_nbytes,
        no_sync=no_sync,
        state_buffers=sum(stream_buffer_nbytes(plan)),
        host=host_nbytes(plan),
        disk=disk_nbytes(plan),
        at_rest=sum(itemsize(dtype) for dtype in {group.shown_dtype for _, group in plan.groups()}),
        step=exchange_buffers(plan) + factor_buffers(plan),
    )


def checkpoint_copy_nbytes(plan: Plan) -> int:
    """Host memory that a save in the background takes for its copy, on the rank with the most.

    That is the rank's part of the parameters, in fp32 where there is a master, and of the moments. The model's buffers
    and the optimizer's step counts, some bytes for each parameter, come on top.
    """
    ranks = max((group.layout.shards for _, group in plan.groups()), default=1)
    return max(sum(_saved_nbytes(group, rank) for _, group in plan.groups()) for rank in range(ranks))


def memory_state_nbytes(plan: Plan, *, copies_elsewhere: bool) -> int:
    """Host memory that an elastic job takes for each rank to keep its state in (`checkpoint.memory_steps`).

    Two versions of the rank's own part, and two of the copy on the next node. With `copies_elsewhere` (ranks of other
    nodes have the same part) there is no such copy. Until the first version of a new round is whole the versions of the
    round before are kept, too.
    """
    return checkpoint_copy_nbytes(plan) * (2 if copies_elsewhere else 4)


def _saved_nbytes(group: GroupPlan, rank: int) -> int:
    """What a rank saves of a group, each parameter's part rounded up as in the copy."""
    sizes = [4 if group.master is not None else itemsize(group.param.dtype)]
    blocks = None if group.moments is None else group.moments.blocks
    if group.moments is not None and blocks is None:
        sizes += [itemsize(group.moments.dtype)] * group.moments.copies
    found = 0
    for _, low, high in group.layout.pieces(*group.layout.shard_range(rank)) if rank < group.layout.shards else ():
        parts = [(high - low) * size for size in sizes]
        if group.moments is not None and blocks is not None:
            parts += [blocks.code_nbytes(high - low), blocks.scale_nbytes(high - low)] * group.moments.copies
        found += sum(-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in parts)
    return found

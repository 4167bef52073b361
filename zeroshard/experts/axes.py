"""The axis of experts over neighbouring ranks, made once for each process group.

Layers that divide themselves when they are built each ask for the same axis, and every DeviceMesh makes communicators
of its own. They are remembered with the default process group, and go with it. Rejected: to hand a mesh from layer to
layer, for which DeepSpeed's interface has no place.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.device_mesh import device_mesh_of
from zeroshard.comm.mesh import world_size
from zeroshard.errors import PlanError
from zeroshard.mesh import EXPERT, REPLICATE, SHARD, Mesh, MeshAxis

_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, str], DeviceMesh]] = WeakKeyDictionary()


def neighbours_mesh(ranks: int, device_type: str, key: str) -> DeviceMesh:
    """A mesh of all ranks whose inner axis `ep` has so many; called by all ranks.

    Args:
        key: what asks for it, for messages.

    Raises:
        PlanError: their number does not divide by `ranks`.
    """
    world, everyone = world_size(), dist.group.WORLD
    if world % ranks or everyone is None:
        raise PlanError(f"{key} {ranks} does not divide the {world} ranks that run")
    made = _MADE.setdefault(everyone, {})
    if (ranks, device_type) not in made:
        axes = (MeshAxis(REPLICATE, 1), MeshAxis(SHARD, world // ranks), MeshAxis(EXPERT, ranks))
        made[ranks, device_type] = device_mesh_of(Mesh(axes), device_type)
    return made[ranks, device_type]

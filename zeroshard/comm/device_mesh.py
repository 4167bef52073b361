"""Converts between torch's DeviceMesh and the mesh of a plan.

The dims of a DeviceMesh have the usual names (`dp_replicate`, `dp_shard`, `tp`, ...) or older names of the same axes.
Ranks must be numbered row by row, as `init_device_mesh` numbers them.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroshard.errors import PlanError
from zeroshard.mesh import DATA, KNOWN, REPLICATE, SHARD, Mesh, MeshAxis, axis_name


def mesh_from(device_mesh: DeviceMesh) -> Mesh:
    """The mesh of a DeviceMesh over all ranks; axes of data parallelism that it leaves out have one rank.

    Raises PlanError for dims without names or with unknown ones, and for ranks that are not numbered row by row.
    """
    names = device_mesh.mesh_dim_names
    if names is None:
        raise PlanError(f"the DeviceMesh has no mesh_dim_names; name its dims, out of {', '.join(KNOWN)}")
    ranks = device_mesh.mesh.flatten().tolist()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != list(range(world)):
        raise PlanError(
            f"the DeviceMesh has the ranks {ranks}, but all {world} are needed, numbered row by row; make it with "
            "torch.distributed.init_device_mesh"
        )
    sizes = device_mesh.mesh.shape
    axes = [MeshAxis(axis_name(name), int(size)) for name, size in zip(names, sizes, strict=True)]
    present = {axis.name for axis in axes}
    place = next((index for index, axis in enumerate(axes) if axis.name in DATA), 0)
    if SHARD not in present:
        axes.insert(place + (REPLICATE in present), MeshAxis(SHARD, 1))
    if REPLICATE not in present:
        axes.insert(place, MeshAxis(REPLICATE, 1))
    return Mesh(tuple(axes))


def device_mesh_of(mesh: Mesh, device_type: str) -> DeviceMesh:
    """A DeviceMesh with the axes of `mesh`, over the default process group; called by all ranks.

    Args:
        device_type: "cuda" or "cpu".
    """
    sizes = tuple(axis.size for axis in mesh.axes)
    return init_device_mesh(device_type, sizes, mesh_dim_names=mesh.names)

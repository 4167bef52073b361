"""Parameters that the model itself divides over ranks: DTensors on an axis of tensor parallelism.

    parallelize_module, tp_plan="auto"        DTensor: shape of the whole, gradient hooks, placements
                                                 |- its local tensor, the `holder`: a plain one
    ZeRO                                      places the holder's elements over the data axes, as any parameter's

The DTensor stays the parameter: the optimizer has it, autograd leaves gradients on it, state dicts name it. Only the
memory of its holder is ZeRO's. torch.distributed.tensor takes a second to import, so it is imported where there is a
DTensor. Rejected: plain parameters in place of DTensors, which are wrapped again in each forward; what a user holds of
the model would be another object than what trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.errors import PlanError
from zeroshard.mesh import DATA, EXPERT, MODEL_AXES, TENSOR, Mesh, MeshAxis, axis_name
from zeroshard.sharding.cut import Cut

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """The tensor, if it is a DTensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def holder_of(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that has the parameter's memory: the local tensor of a DTensor, else the parameter itself."""
    found = as_dtensor(parameter)
    return parameter if found is None else found._local_tensor


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as the parameter's holder has it: what autograd left as partial sums is summed over the axis."""
    of, found = as_dtensor(parameter), as_dtensor(gradient)
    if of is None or found is None:
        return gradient
    if found.placements != of.placements:
        found = found.redistribute(of.device_mesh, of.placements)
    local = found._local_tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return cast("torch.Tensor", local.wait()) if isinstance(local, AsyncCollectiveTensor) else local


def prepare_holder(parameter: torch.Tensor, part: torch.Tensor) -> None:
    """Let a DTensor parameter be able to hold what `part` holds: the same object, of another dtype or device."""
    of = as_dtensor(parameter)
    if of is None or (of.dtype == part.dtype and of._local_tensor.device == part.device):
        return
    made = nn.Parameter(_like(of, part), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    torch.utils.swap_tensors(parameter, made)


def _like(parameter: DTensor, part: torch.Tensor) -> DTensor:
    from torch.distributed.tensor import DTensor

    shape = torch.Size(parameter.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def cut_of(name: str, parameter: torch.Tensor) -> Cut | None:
    """How the model divides a parameter; None for one that every rank has whole.

    Raises:
        PlanError: it is divided in a way that no plan can hold.
    """
    of = as_dtensor(parameter)
    if of is None:
        return None
    cuts = [cut for number, axis in _axes(of) if (cut := _cut(name, of, number, axis)) is not None]
    if len(cuts) > 1:
        raise PlanError(
            f"parameter {name!r} is divided over {' and '.join(cut.axis for cut in cuts)}; one axis is built"
        )
    return cuts[0] if cuts else None


def _axes(of: DTensor) -> Iterator[tuple[int, str]]:
    """Number and name of the dims of a DTensor's mesh that have several ranks."""
    names = of.device_mesh.mesh_dim_names
    for number, size in enumerate(of.device_mesh.shape):
        if size > 1:
            yield number, TENSOR if names is None else axis_name(names[number])


def _cut(name: str, of: DTensor, number: int, axis: str) -> Cut | None:
    placement, ranks = of.placements[number], of.device_mesh.shape[number]
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if placement.is_partial() or dim is None:
        raise PlanError(f"parameter {name!r} is {placement} over {axis!r}: a parameter is divided or replicated")
    if axis not in MODEL_AXES:
        raise PlanError(
            f"parameter {name!r} is divided over {axis!r} already (fully_shard, say): ZeRO itself divides parameters "
            "over data axes; take the model as it was before"
        )
    dim, blocks = dim % of.ndim, int(getattr(placement, "split_factor", 1))
    size = torch.Tensor.size(of)[dim]
    if size % (ranks * blocks):
        parts = f"{ranks} ranks" if blocks == 1 else f"{ranks} ranks in each of {blocks} blocks"
        raise PlanError(
            f"parameter {name!r}: dim {dim} of {size} elements does not divide by the {parts} of axis {axis!r}; pad "
            "the dim, choose another number of ranks, or leave the parameter out of the plan of tensor parallelism"
        )
    return Cut(axis, dim, ranks, blocks)


def mesh_with_model(model: nn.Module, mesh: Mesh | None, shard_size: int | None = None) -> Mesh:
    """The ranks as axes: those given, or where none are, those along which the model is divided and data axes around.

    On a mesh with pipeline stages, whose other ranks have other parameters, an axis may be unused on this one.

    Raises:
        PlanError: the mesh and the model's own do not agree.
    """
    found: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        for axis, ranks in _groups(parameter):
            if found.setdefault(axis, ranks) != ranks:
                raise PlanError(
                    f"parameter {name!r} is divided over ranks {ranks} along {axis!r}, others over {found[axis]}: one "
                    "axis of each name is built; divide all over the same ranks"
                )
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if mesh is None:
        mesh = _around(found, world, shard_size)
    for axis, ranks in found.items():
        if axis not in mesh.names or mesh.size((axis,)) == 1:
            raise PlanError(
                f"the model is divided over {len(ranks)} ranks of an axis {axis!r}, which the mesh ({mesh}) has not"
            )
        own = next(group for group in mesh.groups((axis,)) if dist.get_rank() in group)
        if own != ranks:
            raise PlanError(
                f"the model is divided over ranks {ranks} along {axis!r}, the mesh ({mesh}) has {own} there; divide "
                "the model over a DeviceMesh of the same axes"
            )
    if mesh.of_stage() == mesh:
        refuse_unused(mesh, found)
    return mesh


def refuse_unused(mesh: Mesh, used: Iterable[str]) -> None:
    """Raises PlanError for an axis of several ranks over which nothing of the model is divided."""
    for axis in mesh.among(MODEL_AXES):
        if mesh.size((axis,)) > 1 and axis not in used:
            raise PlanError(
                f"mesh: axis {axis!r} has {mesh.size((axis,))} ranks, but nothing uses it: no parameter of the model "
                "is a DTensor on it. Call parallelize_module on the model first, or load it with its own plan"
            )


def axes_of_model(model: nn.Module) -> frozenset[str]:
    """The axes over which the model divides parameters."""
    return frozenset(axis for parameter in model.parameters() for axis, _ in _groups(parameter))


def has_dtensors(model: nn.Module) -> bool:
    """Whether the model divides any of its parameters."""
    return any(as_dtensor(parameter) is not None for parameter in model.parameters())


def data_ranks(model: nn.Module, mesh: Mesh | None) -> int:
    """The ranks that read different data, on the mesh that `mesh_with_model` gives."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if mesh is None and not has_dtensors(model):
        return world
    return mesh_with_model(model, mesh).data_parallel_size


def _groups(parameter: torch.Tensor) -> Iterator[tuple[str, list[int]]]:
    """The model axes on which a parameter is, and the ranks that this one meets there."""
    of = as_dtensor(parameter)
    for number, axis in () if of is None else _axes(of):
        if axis in MODEL_AXES:
            assert of is not None
            place = of.device_mesh.get_coordinate()
            assert place is not None
            index = tuple(slice(None) if dim == number else at for dim, at in enumerate(place))
            yield axis, of.device_mesh.mesh[index].tolist()


def _around(found: dict[str, list[int]], world: int, shard_size: int | None) -> Mesh:
    """Data axes around the model's own, where these are neighbours."""
    if not found:
        return Mesh.data_parallel(world, shard_size)
    if len(found) > 1:
        axes = ", ".join(repr(axis) for axis in (DATA[1], *sorted(found)))
        raise PlanError(
            f"the model is divided over {' and over '.join(sorted(found))}; name all axes in a mesh, mesh="
            f"init_device_mesh(..., mesh_dim_names=({axes})) say"
        )
    ((axis, ranks),) = found.items()
    first = ranks[0] // len(ranks) * len(ranks)
    if world % len(ranks) or ranks != list(range(first, first + len(ranks))):
        raise PlanError(
            f"the model is divided over ranks {ranks} of {world} along {axis!r}; name all axes in a mesh, mesh="
            f"init_device_mesh(..., mesh_dim_names=({DATA[1]!r}, {axis!r})) say"
        )
    if shard_size is not None and axis == EXPERT:  # a subgroup has all experts
        if shard_size % len(ranks):
            raise PlanError(f"a shard group of {shard_size} ranks does not hold all {len(ranks)} ranks of {axis!r}")
        shard_size //= len(ranks)
    data = Mesh.data_parallel(world // len(ranks), shard_size)
    return Mesh((*data.axes, MeshAxis(axis, len(ranks))))

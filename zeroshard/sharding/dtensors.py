"""Parameters that the model itself divides over ranks: DTensors on an axis of tensor parallelism.

    parallelize_module, tp_plan="auto"        DTensor: shape of the whole parameter, gradient hooks, placements
                                                 |- its local tensor, the `holder`: a plain tensor
    ZeRO                                      shards the holder's elements over the data axes, like any parameter

The DTensor stays the parameter: the optimizer has it, autograd leaves gradients on it, state dicts name it. ZeRO
changes only the memory of its holder. torch.distributed.tensor takes a second to import, so it is imported only where
there is a DTensor. Rejected: to replace DTensors by plain parameters that each forward wraps again; the parameter that
a user has from the model would not be the one that is trained.
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
    """A gradient in the layout of the parameter's holder; partial sums that autograd left are summed over the axis."""
    dtensor, found = as_dtensor(parameter), as_dtensor(gradient)
    if dtensor is None or found is None:
        return gradient
    if found.placements != dtensor.placements:
        found = found.redistribute(dtensor.device_mesh, dtensor.placements)
    local = found._local_tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return cast("torch.Tensor", local.wait()) if isinstance(local, AsyncCollectiveTensor) else local


def prepare_holder(parameter: torch.Tensor, part: torch.Tensor) -> None:
    """Give a DTensor parameter the dtype and device of `part`; the parameter stays the same object."""
    dtensor = as_dtensor(parameter)
    if dtensor is None or (dtensor.dtype == part.dtype and dtensor._local_tensor.device == part.device):
        return
    made = nn.Parameter(_dtensor_like(dtensor, part), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    torch.utils.swap_tensors(parameter, made)


def _dtensor_like(parameter: DTensor, part: torch.Tensor) -> DTensor:
    from torch.distributed.tensor import DTensor

    shape = torch.Size(parameter.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def cut_of(name: str, parameter: torch.Tensor) -> Cut | None:
    """How the model divides a parameter; None for one that every rank has whole.

    Raises:
        PlanError: it is divided in a way that plans don't support.
    """
    dtensor = as_dtensor(parameter)
    if dtensor is None:
        return None
    cuts = [cut for number, axis in _axes(dtensor) if (cut := _cut(name, dtensor, number, axis)) is not None]
    if len(cuts) > 1:
        raise PlanError(
            f"parameter {name!r} is divided over {' and '.join(cut.axis for cut in cuts)}; only one axis is supported"
        )
    return cuts[0] if cuts else None


def _axes(dtensor: DTensor) -> Iterator[tuple[int, str]]:
    """Number and name of the axes of a DTensor's mesh that have several ranks."""
    names = dtensor.device_mesh.mesh_dim_names
    for number, size in enumerate(dtensor.device_mesh.shape):
        if size > 1:
            yield number, TENSOR if names is None else axis_name(names[number])


def _cut(name: str, dtensor: DTensor, number: int, axis: str) -> Cut | None:
    placement, ranks = dtensor.placements[number], dtensor.device_mesh.shape[number]
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if placement.is_partial() or dim is None:
        raise PlanError(f"parameter {name!r} is {placement} over {axis!r}: only Shard and Replicate are supported")
    if axis not in MODEL_AXES:
        raise PlanError(
            f"parameter {name!r} is divided over {axis!r} already (fully_shard, say): ZeRO itself shards parameters "
            "over data axes; pass the model without that"
        )
    dim, blocks = dim % dtensor.ndim, int(getattr(placement, "split_factor", 1))
    size = torch.Tensor.size(dtensor)[dim]
    if size % (ranks * blocks):
        parts = f"{ranks} ranks" if blocks == 1 else f"{ranks} ranks in each of {blocks} blocks"
        raise PlanError(
            f"parameter {name!r}: dim {dim} of {size} elements does not divide by the {parts} of axis {axis!r}; pad "
            "the dim, choose another number of ranks, or leave the parameter out of the plan of tensor parallelism"
        )
    return Cut(axis, dim, ranks, blocks)


def mesh_with_model(model: nn.Module, mesh: Mesh | None, shard_size: int | None = None) -> Mesh:
    """The given mesh; without one, a mesh of the axes along which the model is divided, and data axes around them.

    On a mesh with pipeline stages an axis may be unused on this rank, since other stages have other parameters.

    Raises:
        PlanError: the mesh does not agree with those of the model's DTensors.
    """
    found: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        for axis, ranks in _model_groups(parameter):
            if found.setdefault(axis, ranks) != ranks:
                raise PlanError(
                    f"parameter {name!r} is divided over ranks {ranks} along {axis!r}, others over {found[axis]}: an "
                    "axis may have only one set of ranks; divide all parameters over the same ranks"
                )
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if mesh is None:
        mesh = _mesh_around(found, world, shard_size)
    if mesh.among(DATA) != DATA:
        raise PlanError(f"the mesh ({mesh}) needs the axes {list(DATA)} in this order, of 1 rank where it has no use")
    for axis, ranks in found.items():
        if axis not in mesh.names or mesh.size((axis,)) == 1:
            raise PlanError(
                f"the model is divided over {len(ranks)} ranks of an axis {axis!r}, which is not in the mesh ({mesh})"
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
    return frozenset(axis for parameter in model.parameters() for axis, _ in _model_groups(parameter))


def ranks_of_axis(model: nn.Module, axis: str) -> int:
    """The number of ranks over which the model divides parameters along an axis; 1 where it divides none."""
    groups = (ranks for parameter in model.parameters() for name, ranks in _model_groups(parameter) if name == axis)
    return max(map(len, groups), default=1)


def has_dtensors(model: nn.Module) -> bool:
    """Whether the model divides any of its parameters."""
    return any(as_dtensor(parameter) is not None for parameter in model.parameters())


def data_ranks(model: nn.Module, mesh: Mesh | None) -> int:
    """The number of ranks that read different data, on the mesh that `mesh_with_model` returns."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if mesh is None and not has_dtensors(model):
        return world
    return mesh_with_model(model, mesh).data_parallel_size


def tensor_ranks(model: nn.Module, mesh: Mesh | None) -> int:
    """The number of ranks that read the same data, since they have parts of the same weights."""
    mesh = mesh_with_model(model, None) if mesh is None and has_dtensors(model) else mesh
    return 1 if mesh is None or TENSOR not in mesh.names else mesh.size((TENSOR,))


def _model_groups(parameter: torch.Tensor) -> Iterator[tuple[str, list[int]]]:
    """The model axes of a parameter, each with the ranks of this rank's group along it."""
    dtensor = as_dtensor(parameter)
    for number, axis in () if dtensor is None else _axes(dtensor):
        if axis in MODEL_AXES:
            assert dtensor is not None
            place = dtensor.device_mesh.get_coordinate()
            assert place is not None
            index = tuple(slice(None) if dim == number else at for dim, at in enumerate(place))
            yield axis, dtensor.device_mesh.mesh[index].tolist()


def _mesh_around(found: dict[str, list[int]], world: int, shard_size: int | None) -> Mesh:
    """A mesh with data axes around the model's axis, whose ranks must be consecutive. Raises PlanError."""
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

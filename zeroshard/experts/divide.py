"""Divides the experts of a model over the ranks of an axis: each weight becomes a DTensor along its dim of experts.

A DTensor can't take the place of a plain parameter in the same object, so who divides learns which parameter is in the
place of which. Rejected: plain parameters of a smaller shape, of which nobody knows that they are parts of one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.device_mesh import device_mesh_of, mesh_from
from zeroshard.comm.mesh import world_size
from zeroshard.errors import PlanError
from zeroshard.experts.fused import fused_experts, send_tokens
from zeroshard.mesh import EXPERT, REPLICATE, SHARD, STAGES, Mesh, MeshAxis, axis_name
from zeroshard.sharding.dtensors import as_dtensor, axes_of_model
from zeroshard.sharding.resting import is_resting


def divide_experts(model: nn.Module, mesh: DeviceMesh | Mesh | None, device_type: str) -> dict[int, nn.Parameter]:
    """Divide the experts of all layers over the axis `ep`, where the mesh has one and they are not divided yet.

    Called by all ranks. Ranks along the axis read different data, and send tokens to the ranks of the experts that
    these choose.

    Returns:
        By the id of each parameter that the model had, the one that it has in its place.

    Raises:
        PlanError: there are no experts, they have no values, or their number does not divide by the ranks.
    """
    named = mesh_from(mesh) if isinstance(mesh, DeviceMesh) else mesh
    several = () if named is None else [axis.name for axis in named.axes if axis.size > 1]
    if named is None or EXPERT not in several or STAGES in several or EXPERT in axes_of_model(model):
        return {}  # experts in pipeline stages are refused where the mesh is read
    found = list(fused_experts(model))
    if not found:
        raise PlanError(
            f"mesh: axis {EXPERT!r} has {named.size((EXPERT,))} ranks, but nothing uses it: {type(model).__name__} has "
            "no experts that are divided over ranks. These are modules with num_experts, weights with a dim for it and "
            "forward(hidden_states, top_k_index, top_k_weights), as transformers has them"
        )
    for path, module, experts in found:
        _check(path, module, experts, named.size((EXPERT,)))
    axis = _axis(mesh if isinstance(mesh, DeviceMesh) else device_mesh_of(named, device_type))
    replaced: dict[int, nn.Parameter] = {}
    for _, module, experts in found:
        for name, parameter in module.named_parameters(recurse=False):
            replaced[id(parameter)] = made = _part(parameter, axis)
            module._parameters[name] = made
        send_tokens(module, experts, axis.get_group())
    return replaced


def divide_over_neighbours(model: nn.Module, ranks: int, device_type: str, key: str) -> dict[int, nn.Parameter]:
    """The same over so many ranks with consecutive numbers; `key` asks for it."""
    world = world_size()
    if world % ranks:
        raise PlanError(f"{key} {ranks} does not divide the {world} ranks that run")
    axes = (MeshAxis(REPLICATE, 1), MeshAxis(SHARD, world // ranks), MeshAxis(EXPERT, ranks))
    return divide_experts(model, Mesh(axes), device_type)


def _axis(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[next(name for name in names if axis_name(name) == EXPERT)]


def _check(path: str, module: nn.Module, experts: int, ranks: int) -> None:
    if experts % ranks:
        raise PlanError(f"{path} has {experts} experts, which {ranks} ranks of axis {EXPERT!r} do not divide")
    for name, parameter in module.named_parameters(recurse=False):
        whole = f"{path}.{name}"
        if parameter.is_meta or is_resting(parameter):
            raise PlanError(
                f"parameter {whole!r} has no values here (zero.Init, the meta device); build the model outside of it"
            )
        if as_dtensor(parameter) is not None:
            raise PlanError(f"parameter {whole!r} is divided already; take the model as it was before")


def _part(parameter: nn.Parameter, axis: DeviceMesh) -> nn.Parameter:
    from torch.distributed.tensor import DTensor, Shard

    shape = parameter.shape
    part = parameter.detach().chunk(axis.size())[axis.get_local_rank()].clone(memory_format=torch.contiguous_format)
    stride = torch.empty(shape, device="meta").stride()
    value = DTensor.from_local(part, axis, [Shard(0)], run_check=False, shape=shape, stride=stride)
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made

"""Divides the experts of a model over the ranks of an axis: each weight becomes a DTensor along its dim of experts.

A DTensor can't take the place of a plain parameter in the same object, so who divides learns which parameter is in the
place of which. Rejected: plain parameters of a smaller shape, of which nobody knows that they are parts of one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.device_mesh import device_mesh_of, mesh_from
from zeroshard.errors import PlanError
from zeroshard.experts.axes import neighbours_mesh
from zeroshard.experts.fused import fused_experts, send_tokens
from zeroshard.experts.stacked import StackedExperts
from zeroshard.first_values import take_first_values
from zeroshard.mesh import EXPERT, STAGES, Mesh, axis_name
from zeroshard.sharding.dtensors import as_dtensor, axes_of_model
from zeroshard.sharding.resting import is_resting
from zeroshard.sharding.unowned import unowned_shard_of
from zeroshard.sharding.unowned_values import take_whole


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
    if named is None or EXPERT not in several or EXPERT in axes_of_model(model):
        return {}
    whole = mesh if isinstance(mesh, DeviceMesh) else device_mesh_of(named, device_type)  # by all ranks
    fused = list(fused_experts(model))
    stacked = [(path, one, one.num_experts) for path, one in model.named_modules() if isinstance(one, StackedExperts)]
    found = [*fused, *stacked]
    if not found and STAGES in several:
        return {}  # another stage has them; that one has is checked where the mesh is read
    if not found:
        raise PlanError(
            f"mesh: axis {EXPERT!r} has {named.size((EXPERT,))} ranks, but nothing uses it: {type(model).__name__} has "
            "no experts that are divided over ranks. These are modules with num_experts, weights with a dim for it and "
            "forward(hidden_states, top_k_index, top_k_weights), as transformers has them"
        )
    for path, module, experts in found:
        _check(path, module, experts, named.size((EXPERT,)))
    axis = _axis(whole)
    values = (one for _, module, _ in found for one in module.parameters())
    take_first_values(values, axis.get_group(), torch.device(device_type))
    replaced: dict[int, nn.Parameter] = {}
    for _, module, experts in fused:
        _replace(module, axis, replaced)
        send_tokens(module, experts, axis.get_group())
    for _, module, _ in stacked:
        for part in module.modules():
            _replace(part, axis, replaced)
    return replaced


def divide_as_stacked(model: nn.Module, device_type: str) -> dict[int, nn.Parameter]:
    """The same over as many ranks as the model's stacked experts say."""
    sizes = {one.ranks for one in model.modules() if isinstance(one, StackedExperts) and one.ranks > 1}
    if len(sizes) > 1:
        raise PlanError(
            f"the model has experts over {' and over '.join(map(str, sorted(sizes)))} ranks; one axis {EXPERT!r} is "
            "built: give all layers the same ep_size"
        )
    return divide_over_neighbours(model, sizes.pop(), device_type, "ep_size") if sizes else {}


def divide_over_neighbours(model: nn.Module, ranks: int, device_type: str, key: str) -> dict[int, nn.Parameter]:
    """The same over so many ranks with consecutive numbers; `key` asks for it."""
    return divide_experts(model, neighbours_mesh(ranks, device_type, key), device_type)


def _axis(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[next(name for name in names if axis_name(name) == EXPERT)]


def _replace(module: nn.Module, axis: DeviceMesh, replaced: dict[int, nn.Parameter]) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        made = replaced.get(id(parameter))  # one of several names
        if made is None:
            made = replaced[id(parameter)] = _part(parameter, axis)
        module._parameters[name] = made


def _check(path: str, module: nn.Module, experts: int, ranks: int) -> None:
    if experts % ranks:
        raise PlanError(f"{path} has {experts} experts, which {ranks} ranks of axis {EXPERT!r} do not divide")
    for name, parameter in module.named_parameters(recurse=isinstance(module, StackedExperts)):
        whole = f"{path}.{name}"
        if parameter.is_meta or (is_resting(parameter) and unowned_shard_of(parameter) is None):
            raise PlanError(
                f"parameter {whole!r} has no values yet (zeroshard.Init, the meta device), or belongs to an engine; "
                "build the model outside of it, or under deepspeed.zero.Init"
            )
        if as_dtensor(parameter) is not None:
            raise PlanError(f"parameter {whole!r} is divided already; take the model as it was before")


def _part(parameter: nn.Parameter, axis: DeviceMesh) -> nn.Parameter:
    from torch.distributed.tensor import DTensor, Shard

    # Of one that ranks share already (zero.Init) all of them gather the whole, one after the other.
    whole = take_whole(parameter).to(parameter.dtype) if is_resting(parameter) else parameter.detach()
    part = whole.chunk(axis.size())[axis.get_local_rank()].clone(memory_format=torch.contiguous_format)
    part = part.to(axis.device_type)
    stride = torch.empty(whole.shape, device="meta").stride()
    value = DTensor.from_local(part, axis, [Shard(0)], run_check=False, shape=whole.shape, stride=stride)
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(made).update({name: value for name, value in vars(parameter).items() if not name.startswith("_zeroshard")})
    return made

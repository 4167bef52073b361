"""Divides a model over ranks before it is sharded, where a mesh or the config asks for tensors or experts in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.device_mesh import mesh_from
from zeroshard.config.document import Source as ConfigSource
from zeroshard.config.document import read_document
from zeroshard.config.problems import Problems
from zeroshard.errors import PlanError
from zeroshard.experts.divide import divide_as_stacked, divide_experts, divide_over_neighbours
from zeroshard.mesh import EXPERT, TENSOR, Mesh
from zeroshard.pipeline.module import PipelineModule
from zeroshard.tensor_division import divide_by_plan


def divide_model(model: nn.Module, document: ConfigSource, mesh: Any, device_type: str) -> dict[int, nn.Parameter]:
    """Divide the model where a mesh or the config asks for it; what replaces which parameter."""
    root = read_document(document, Problems()).root
    replaced: dict[int, nn.Parameter] = {}
    tensor, size = _section_with(root, "tensor_parallel", "autotp_size")
    experts, parts = _section_with(root, "expert_parallel", "autoep_size")
    asked = parts if experts.get("enabled") is True else 1
    if isinstance(model, PipelineModule):
        _check_sizes(model.topology().mesh(), size, asked)
    elif isinstance(mesh, DeviceMesh):
        _check_sizes(mesh_from(mesh), size, asked)
        replaced |= divide_experts(model, mesh, device_type)
    elif size > 1 and asked > 1:
        raise PlanError(
            f"tensor_parallel.autotp_size {size} beside expert_parallel.autoep_size {asked}: say how their ranks stand "
            "to each other, initialize(mesh_param=init_device_mesh(..., mesh_dim_names=('dp_shard', 'ep', 'tp'))) say"
        )
    if asked > 1:
        replaced |= divide_over_neighbours(model, asked, device_type, "expert_parallel.autoep_size")
    if size > 1:
        partition = tensor.get("partition_config")
        staged = isinstance(model, PipelineModule)
        replaced |= divide_by_plan(model, size, device_type, partition, staged=staged)
    return replaced | divide_as_stacked(model, device_type)


def _check_sizes(mesh: Mesh, tensor: int, experts: int) -> None:
    """Raises PlanError where a config asks for other sizes than the mesh has."""
    for key, axis, size in (
        ("tensor_parallel.autotp_size", TENSOR, tensor),
        ("expert_parallel.autoep_size", EXPERT, experts),
    ):
        of_mesh = mesh.size((axis,)) if axis in mesh.names else 1
        if size > 1 and size != of_mesh:
            raise PlanError(
                f"{key} is {size}, but the mesh ({mesh}) has {of_mesh} ranks of {axis!r}; change one of them"
            )


def _section_with(root: Mapping[str, Any], name: str, key: str) -> tuple[Mapping[str, Any], int]:
    """A section, and a size in it; what is wrong with them is said where the whole config is read."""
    section = root.get(name)
    section = section if isinstance(section, Mapping) else {}
    size = section.get(key)
    if isinstance(size, float) and size.is_integer():  # as the config takes it
        size = int(size)
    return section, size if type(size) is int else 1

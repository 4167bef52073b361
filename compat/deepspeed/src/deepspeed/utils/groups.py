"""Process groups: of the ranks that read different data, of those that have parts of one sequence, and of experts'.

A sequence is divided by `register_with_transformers`, `initialize(mpu=...)`, `sequence_parallel_size` or an axis of a
mesh; where none of them has been asked, each rank has whole ones. Groups of experts over neighbouring ranks are named
`ep_size_N`, as `MoE` names them, and are made where they are first asked for, by all ranks.
"""

from __future__ import annotations

import torch.distributed as dist

from deepspeed._exports import lazy
from zeroshard.engine.build import default_device
from zeroshard.errors import UsageError
from zeroshard.experts.axes import neighbours_mesh
from zeroshard.mesh import EXPERT, SHARD
from zeroshard.parallel.sequence_axis import SequenceAxis, find_axis

__getattr__, __dir__ = lazy(__name__, {})


def _get_data_parallel_group() -> dist.ProcessGroup | None:
    axis = find_axis()
    return dist.group.WORLD if axis is None else axis.data_group


def _get_data_parallel_world_size() -> int:
    axis = find_axis()
    return dist.get_world_size() if axis is None else axis.mesh.data_parallel_size


def _get_data_parallel_rank() -> int:
    axis = find_axis()
    return dist.get_rank() if axis is None else axis.data_place


def _get_sequence_parallel_group() -> dist.ProcessGroup:
    return _axis().group


def _get_sequence_parallel_world_size() -> int:
    axis = find_axis()
    return 1 if axis is None else axis.size


def _get_sequence_parallel_rank() -> int:
    axis = find_axis()
    return 0 if axis is None else axis.place


def _get_sequence_data_parallel_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD


def _get_sequence_data_parallel_world_size() -> int:
    return dist.get_world_size()


def _get_sequence_data_parallel_rank() -> int:
    return dist.get_rank()


def _axis() -> SequenceAxis:
    axis = find_axis()
    if axis is None:
        raise UsageError(
            "no sequences are divided over ranks, so there is no group for them: call "
            "UlyssesSPAttentionHF.register_with_transformers or initialize with sequence_parallel_size before"
        )
    return axis


def _get_expert_parallel_group(group_name: str) -> dist.ProcessGroup:
    """The ranks among which this rank's group of experts is divided."""
    return _group(group_name, EXPERT)


def _get_expert_parallel_world_size(group_name: str) -> int:
    return _get_expert_parallel_group(group_name).size()


def _get_expert_parallel_rank(group_name: str) -> int:
    return _get_expert_parallel_group(group_name).rank()


def _get_expert_data_parallel_group(group_name: str) -> dist.ProcessGroup:
    """The ranks that have the same experts."""
    return _group(group_name, SHARD)


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return _get_expert_data_parallel_group(group_name).size()


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _get_expert_data_parallel_group(group_name).rank()


def _group(name: str, axis: str) -> dist.ProcessGroup:
    kind, _, ranks = name.rpartition("_")
    if kind != "ep_size" or not ranks.isdigit() or int(ranks) < 1:
        raise UsageError(f"a group of experts {name!r}: 'ep_size_N' is needed, the expert_group_name of a MoE layer")
    return neighbours_mesh(int(ranks), default_device().type, name)[axis].get_group()

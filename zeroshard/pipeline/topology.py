"""Ranks as named axes under DeepSpeed's names, and what a script asks about its own place among them.

`ProcessTopology` is a value, as `zeroshard.mesh.Mesh` is; only its words are others (`pipe`, `data`, `model`), and
`sequence`, which DeepSpeed's pipelines do not have.
"""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from zeroshard.errors import UsageError
from zeroshard.mesh import REPLICATE, SHARD, STAGES, Mesh, MeshAxis
from zeroshard.parallel.sequence_axis import AXIS, divide_sequences

PIPE, DATA, SEQUENCE, MODEL = "pipe", "data", "sequence", "model"
_AXES = {PIPE: STAGES, DATA: SHARD, SEQUENCE: AXIS, MODEL: "tp"}


class ProcessTopology:
    """Ranks on a grid, numbered row by row: the last axis has neighbouring numbers.

    Args:
        axes: their names, outermost first.
        dims: ranks along each.

    Attributes:
        ProcessCoord: the kind of named tuple that a rank's coordinates are.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise UsageError(
                f"ProcessTopology: axes {list(axes)} of {list(dims)} ranks: one size of at least 1 for each"
            )
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)
        places = itertools.product(*map(range, self.dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def world_size(self) -> int:
        """All ranks."""
        return len(self.mapping)

    def get_rank(self, **coordinates: int) -> int:
        """The rank at a place; all axes are to be named."""
        if coordinates.keys() != set(self.axes):
            raise UsageError(f"get_rank: got {sorted(coordinates)}; name each of {self.axes}")
        place = self.ProcessCoord(**coordinates)
        if place not in self.mapping:
            raise UsageError(
                f"get_rank: no rank is at {dict(coordinates)}; the axes {self.axes} have {self.dims} ranks"
            )
        return self.mapping[place]

    def get_axis_names(self) -> list[str]:
        """Names of the axes, outermost first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Ranks along an axis; 0 where there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank."""
        for place, number in self.mapping.items():
            if number == rank:
                return place
        raise UsageError(f"get_coord: there is no rank {rank} of {self.world_size()}")

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = (DATA, PIPE),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """A text that names a rank's place on the axes that are not left out: `model_00`."""
        place = self.get_coord(rank)
        kept = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in kept)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ along one axis only; none where there is no such axis."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, rank in self.mapping.items():
            groups.setdefault(tuple(getattr(place, name) for name in others), []).append(rank)
        return list(groups.values())

    def filter_match(self, **coordinates: int) -> list[int]:
        """The ranks whose coordinates are these."""
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == value for axis, value in coordinates.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at one place of an axis."""
        return self.filter_match(**{axis: idx})

    def mesh(self) -> Mesh:
        """The mesh of these axes. Raises UsageError for axes that a pipeline can't have."""
        unknown = [axis for axis in self.axes if axis not in _AXES]
        if unknown or PIPE not in self.axes:
            raise UsageError(f"a pipeline's topology has the axes {list(_AXES)}; got {self.axes}")
        axes = [MeshAxis(_AXES[axis], dim) for axis, dim in zip(self.axes, self.dims, strict=True)]
        if DATA not in self.axes:
            outside = [index for index, axis in enumerate(axes) if axis.name == AXIS]
            axes.insert(next(iter(outside), len(axes)), MeshAxis(SHARD, 1))
        place = next(index for index, axis in enumerate(axes) if axis.name == SHARD)
        axes.insert(place, MeshAxis(REPLICATE, 1))
        return Mesh(tuple(axes))

    def __str__(self) -> str:
        return " x ".join(f"{axis} {dim}" for axis, dim in zip(self.axes, self.dims, strict=True))


class PipeDataParallelTopology(ProcessTopology):
    """Stages outermost, so that the ranks of a stage, which exchange most, are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__([PIPE, DATA], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages outermost, ranks of tensor parallelism innermost."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__([PIPE, DATA, MODEL], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """A rank's place in a topology; an `mpu` for those who ask for one.

    Args:
        topology: of all ranks.
        groups: whether process groups over its axes are made, which all ranks do together.
    """

    def __init__(self, topology: ProcessTopology, process_group: Any = None, *, groups: bool = True) -> None:
        self._topo = topology
        joined = dist.is_available() and dist.is_initialized()
        self.global_rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        if topology.world_size() != self.world_size:
            raise UsageError(
                f"the topology ({topology}) is of {topology.world_size()} ranks, but {self.world_size} are running"
            )
        self._place = topology.get_coord(self.global_rank)
        self.pipe_parallel_size = max(topology.get_dim(PIPE), 1)
        self.data_parallel_size = max(topology.get_dim(DATA), 1)
        self.model_parallel_size = max(topology.get_dim(MODEL), 1)
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.sequence_parallel_size = max(topology.get_dim(SEQUENCE), 1)
        made = {axis: self._own_group(axis) if joined and groups else None for axis in (PIPE, DATA, MODEL)}
        divided = joined and groups and self.sequence_parallel_size > 1
        made[SEQUENCE] = self._sequence_group() if divided else None
        self.pp_group, self.ds_model_proc_group = made[PIPE], None
        self._groups = made

    def _own_group(self, axis: str) -> dist.ProcessGroup | None:
        own: Any = None
        for ranks in self._topo.get_axis_comm_lists(axis):
            group = dist.new_group(ranks)
            own = group if self.global_rank in ranks else own
        return own

    def _sequence_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's sequence, which the process is told of: layers ask while they are built."""
        asked_by = f"the topology's axis {SEQUENCE!r}"
        return divide_sequences(self.sequence_parallel_size, asked_by, self._topo.mesh()).group

    def topology(self) -> ProcessTopology:
        """The topology."""
        return self._topo

    def get_stage_id(self) -> int:
        """The number of this rank's stage."""
        return getattr(self._place, PIPE, 0)

    def get_data_parallel_id(self) -> int:
        """The number of this rank among those that read different data."""
        return getattr(self._place, DATA, 0)

    def stage_to_global(self, stage_id: int, **others: int) -> int:
        """The rank at this rank's place of another stage."""
        return self._topo.get_rank(**{**self._place._asdict(), PIPE: stage_id, **others})

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.pipe_parallel_size - 1

    def get_global_rank(self) -> int:
        """This rank's number among all."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """The number of this rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks at this rank's place of all stages."""
        return self._groups[PIPE]

    def get_data_parallel_rank(self) -> int:
        """The number of this rank among those that read different data."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Ranks that read different data."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks of this stage that read different data."""
        return self._groups[DATA]

    def get_sequence_parallel_rank(self) -> int:
        """Which part of its sequence this rank has."""
        return getattr(self._place, SEQUENCE, 0)

    def get_sequence_parallel_world_size(self) -> int:
        """Ranks that have parts of one sequence."""
        return self.sequence_parallel_size

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks of this rank's sequence; None where each rank has whole ones."""
        return self._groups[SEQUENCE]

    def get_model_parallel_rank(self) -> int:
        """The number of this rank on the axis of tensor parallelism."""
        return getattr(self._place, MODEL, 0)

    def get_model_parallel_world_size(self) -> int:
        """Ranks of tensor parallelism."""
        return self.model_parallel_size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks of tensor parallelism; None without such an axis."""
        return self._groups[MODEL]

    def get_slice_parallel_rank(self) -> int:
        """As `get_model_parallel_rank`."""
        return self.get_model_parallel_rank()

    def get_slice_parallel_world_size(self) -> int:
        """As `get_model_parallel_world_size`."""
        return self.model_parallel_size

    def get_slice_parallel_group(self) -> dist.ProcessGroup | None:
        """As `get_model_parallel_group`."""
        return self._groups[MODEL]

"""What `initialize` is asked to divide sequences by: a size in the config, an mpu, or an axis of a mesh.

All of them may say the same; what says otherwise is refused. Rejected: taking the first one, which would leave ranks
without a word with other data than a library thinks.
"""

from __future__ import annotations

from typing import Any

from zeroshard.errors import PlanError
from zeroshard.mesh import STAGES, Mesh
from zeroshard.parallel.sequence_axis import AXIS, SequenceAxis, SequenceParallel, divide_sequences

SIZE = "sequence_parallel_size"
_QUESTION = "get_sequence_parallel_world_size"


def answers_sequence(mpu: Any) -> bool:
    """Whether an mpu says how sequences are divided, as Megatron's and that of `register_with_transformers` do."""
    return callable(getattr(mpu, _QUESTION, None))


def requested_sequence(size: int, mpu: Any, mesh: Mesh | None) -> SequenceParallel | None:
    """The axis that is asked for and how attention exchanges over it; None for whole sequences. Called by all ranks.

    Args:
        size: of the config.
        mesh: that the caller names.

    Raises:
        PlanError: two of them say different things, or the ranks don't divide.
    """
    along = mesh.size((AXIS,)) if mesh is not None and AXIS in mesh.names else 1
    told = mpu.get_sequence_parallel_world_size() if answers_sequence(mpu) else 1
    claims = {SIZE: size, "mpu": told, f"mesh axis {AXIS!r}": along}
    several = {name: ranks for name, ranks in claims.items() if ranks > 1}
    if not several:
        return None
    if len(set(several.values())) > 1:
        raise PlanError(
            f"sequences can't be divided in two ways: {', '.join(f'{name} {n}' for name, n in several.items())} ranks; "
            "name one of them, or the same number"
        )
    name, ranks = next(iter(several.items()))
    axis = divide_sequences(ranks, name, mesh if along > 1 else None)
    if isinstance(mpu, SequenceParallel):
        return mpu
    return SequenceParallel(axis, exchanges=size > 1 and told == 1)


def agreed_mesh(mesh: Mesh | None, axis: SequenceAxis, *, divided: bool) -> Mesh:
    """The mesh of an engine whose sequences are divided over `axis`.

    Args:
        mesh: the mesh that the caller names, None for none.
        divided: whether the model itself is divided over an axis.

    Raises:
        PlanError: two libraries claim the same ranks.
    """
    if mesh is None and divided:
        raise PlanError(
            f"{SIZE} {axis.size}: the model is divided over neighbouring ranks itself, and they can't "
            "have parts of a sequence, too; name all axes: initialize(mesh_param=init_device_mesh(..., "
            f"mesh_dim_names=('dp_shard', {AXIS!r}, 'tp')))"
        )
    if mesh is None:
        return axis.mesh
    if STAGES in mesh.names and AXIS not in mesh.names:
        raise PlanError(
            f"sequences are divided over {axis.size} ranks, but the PipelineModule was built for {mesh}: say "
            "PipelineModule(layers, topology=ProcessTopology(['pipe', 'data', 'sequence'], [stages, data, "
            f"{axis.size}]))"
        )
    if AXIS not in mesh.names or mesh.size((AXIS,)) != axis.size:
        raise PlanError(
            f"sequences are divided over {axis.size} ranks, but the mesh that was given ({mesh}) has no axis {AXIS!r} "
            "of so many; leave one of them out"
        )
    return mesh

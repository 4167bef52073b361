"""Compares, in the first steps, what the ranks of an axis of tensor parallelism must have alike.

    batches       ranks with parts of one model read the same; with others they train neither's, without a word
    gradients     of parameters that all of them have whole: where a sum over `tp` is missing, the copies part

Ranks of a `tp` group send each other activations alone, so nothing else would notice. Digests of batches, and norm and
sum of each gradient, are noted as they come, and compared before the step. Rejected: to compare in the forward, which
a script may call on some ranks only; and gradients alone: a model that is divided from embedding to head mixes the
batches of all ranks, so that all have the same gradients of nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from zeroshard.comm.collectives import Collectives
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.unit import Unit
from zeroshard.errors import UsageError
from zeroshard.mesh import TENSOR, Mesh
from zeroshard.sharding.dtensors import as_dtensor
from zeroshard.sharding.layout import Segment

_LOOKED_AT = 3
"""Steps with finite gradients that are compared: whoever gives ranks other batches does so then."""
_NORM_GAP, _SUM_GAP = 0.02, 0.2
"""By which part of its norm the norm and the sum of a gradient may differ: kernels add up in other orders."""
_NOISE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Gradients with a smaller part of the largest norm than this may be rounding alone, such as that of a key's bias."""
_NOISE_16_BIT = 1e-3
_HALF = 24
"""Bits of a digest that a float32 holds."""

Row = Sequence[float]
"""Of one gradient: norm and sum."""


class CopiedGradients:
    """What this rank has noted since the last step."""

    def __init__(self) -> None:
        self._left = _LOOKED_AT
        self._found: dict[tuple[int, int], torch.Tensor] = {}
        self._numbers: torch.Tensor | int = 0
        self._floats: torch.Tensor | None = None

    def note_batch(self, arguments: object) -> None:
        """Add the tensors that a forward in training was given."""
        if not self._left:
            return
        for tensor in pytree.tree_leaves(arguments):
            if not isinstance(tensor, torch.Tensor) or as_dtensor(tensor) is not None or tensor.is_complex():
                continue
            if tensor.is_floating_point():
                both = _norm_and_sum(tensor.detach())
                self._floats = both if self._floats is None else self._floats + both
            else:
                places = torch.arange(1, tensor.numel() + 1, device=tensor.device)
                self._numbers = self._numbers * 31 + (tensor.reshape(-1).long() * (2 * places + 1)).sum() + len(places)

    def note(self, group: Group, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add what a backward left of those parameters of `group` that `tp` does not divide."""
        if not self._left:
            return
        for index, (segment, gradient) in enumerate(zip(group.plan.layout.segments, gradients, strict=True)):
            if gradient is None or not gradient.is_floating_point() or gradient.is_sparse or _is_divided(segment):
                continue
            key, both = (id(group), index), _norm_and_sum(gradient)
            self._found[key] = both if key not in self._found else self._found[key] + both

    def compare(self, units: Sequence[Unit], axis: Collectives, control: Collectives, *, capturing: bool) -> None:
        """Compare them; called by all ranks of `control` before a step.

        Args:
            axis, control: over `tp`, and over all ranks.
            capturing: a CUDA graph is being captured, in which nothing can be compared.

        Raises:
            UsageError: on all ranks, where ranks of an axis have other batches, or other gradients of a copy.
        """
        self._left = 0 if capturing else self._left
        found, numbers, floats = self._found, self._numbers, self._floats
        self._found, self._numbers, self._floats = {}, 0, None
        if not self._left:
            return
        device = next(group.device for unit in units for group in unit.groups)
        copies = list(_copies(units))
        rows = [_halves(numbers), torch.zeros(2) if floats is None else floats]
        rows += [found.get((id(group), index), torch.zeros(2)) for group, index, _ in copies]
        own = torch.stack([row.to(device) for row in rows]).view(-1)
        everybody = own.new_empty(axis.size * own.numel())
        axis.wait(axis.all_gather(everybody, own, "(copies)"))
        tables = everybody.view(axis.size, len(rows), 2).tolist()
        noise = [_NOISE.get(group.dtype, _NOISE_16_BIT) for group, _, _ in copies]
        said = _of_batches(tables) or _of_gradients(
            [table[2:] for table in tables], noise, [name for *_, name in copies]
        )
        finite = all(math.isfinite(value) for table in tables for row in table for value in row)
        told = torch.tensor([0 if not said else control.size - control.rank, int(not finite)], device=device)
        control.wait(control.all_reduce(told, "(copies)", op=dist.ReduceOp.MAX))
        behind, infinite = told.tolist()
        self._left -= not infinite
        if behind:
            raise UsageError(said or f"step(): rank {control.size - behind} and others of its {TENSOR!r} group differ")


def has_copies(mesh: Mesh) -> bool:
    """Whether several ranks of the mesh read the same batch along `tp`."""
    return TENSOR in mesh.names and mesh.size((TENSOR,)) > 1


def _norm_and_sum(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=wide), tensor.sum(dtype=wide)]).float()


def _halves(digest: torch.Tensor | int) -> torch.Tensor:
    """The lower bits of a digest as two numbers that float32 holds exactly."""
    number = int(digest)
    return torch.tensor([number >> bits & ((1 << _HALF) - 1) for bits in (0, _HALF)], dtype=torch.float32)


def _is_divided(segment: Segment) -> bool:
    return segment.cut is not None and segment.cut.axis == TENSOR


def _copies(units: Sequence[Unit]) -> Iterator[tuple[Group, int, str]]:
    """Group, index and name of each trained parameter that all ranks of `tp` have whole."""
    for unit in units:
        for group in unit.trainable:
            for index, segment in enumerate(group.plan.layout.segments):
                if not _is_divided(segment):
                    yield group, index, segment.name


def _differ(rows: Sequence[Row], least: float) -> bool:
    """Whether norms and sums of one tensor, of one row a rank, differ by more than rounding."""
    norms, sums = ([row[part] for row in rows] for part in (0, 1))
    norm = max(norms)
    if not all(map(math.isfinite, (*norms, *sums))) or norm <= least:
        return False
    return norm - min(norms) > _NORM_GAP * norm or max(sums) - min(sums) > _SUM_GAP * norm


def _of_batches(tables: Sequence[Sequence[Row]]) -> str:
    """What is wrong with the batches of the ranks of an axis, or nothing."""
    if all(table[0] == tables[0][0] for table in tables) and not _differ([table[1] for table in tables], 0.0):
        return ""
    ranks = len(tables)
    return (
        f"step(): the {ranks} ranks of a {TENSOR!r} group were given different batches, but have parts of one model: "
        "give them the same one, as zeroshard's loaders do. A DistributedSampler of your own needs the number of data "
        f"ranks as num_replicas (all ranks // {ranks}), and as rank, where neighbours form a group, rank // {ranks}"
    )


def _of_gradients(tables: Sequence[Sequence[Row]], noise: Sequence[float], names: Sequence[str]) -> str:
    """What is wrong with gradients of copies, or nothing.

    Args:
        tables: of each rank, a row of each parameter.
        noise: of each parameter the part of the largest norm up to which a gradient may be rounding.
    """
    largest = max((row[0] for table in tables for row in table if math.isfinite(row[0])), default=0.0)
    for index, (name, least) in enumerate(zip(names, noise, strict=True)):
        rows = [table[index] for table in tables]
        if _differ(rows, least * largest):
            norms = ", ".join(f"{row[0]:.6g}" for row in rows)
            return (
                f"step(): parameter {name!r} is whole on all {len(tables)} ranks of a {TENSOR!r} group, but its "
                f"gradient differs (norms {norms}), so their copies would part. It is used between divided layers (a "
                "norm of each head, say), and nothing sums its gradient over the axis; or the loss is of other labels "
                "on each rank. Leave these layers out of tensor_parallel.partition_config, or let the model's own plan "
                "divide it"
            )
    return ""

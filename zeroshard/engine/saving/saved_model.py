"""A sharded model and its optimizer for checkpoints: the pieces that each rank writes, and the targets that it reads.

    group of a unit   [ w1 . | w2 . . | w3 ]            what a rank saves: its shard of the group, cut at parameters,
    rank 0's shard    [ w1 . | w2 ]                     as fp32 master where there is one
    rank 1's shard            [ . . | w3 ]              what it loads: all that it holds of the group

In every stage each element is saved by one rank: the owner of its shard, in the first copy of the state. Parameters
that rest whole but are updated in shards are also loaded in shards, and then gathered.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.checkpoint.error_barrier import LABEL
from zeroshard.checkpoint.loading import Target, has
from zeroshard.checkpoint.manifest import TensorInfo, TensorKind
from zeroshard.checkpoint.reader import StateReader
from zeroshard.checkpoint.writer import Piece
from zeroshard.engine.core.handle import Handle
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.rank_values import rank_range, read_values, write_values
from zeroshard.engine.memory.update_view import update_range
from zeroshard.engine.saving.striped import part_target, whole_pieces, writes_scalars
from zeroshard.errors import CheckpointError
from zeroshard.optim.saved_state import PackedState, SavedState, Scalar, StatePart
from zeroshard.plan.dtypes import state_dtype, torch_dtype
from zeroshard.sharding.layout import Segment
from zeroshard.tiers import RowPart


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a state dict has, each under its first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{path}.{name}" if path else name] = buffer.detach()
    return found


def state_name(parameter: str, key: str) -> str:
    """The name of optimizer state, as torch's flattened optimizer state dicts have it."""
    return f"state.{parameter}.{key}"


# What a rank saves.


def pieces(
    handle: Handle,
    update: SavedState | None,
    differing: Container[str] = (),
    *,
    frozen: bool = True,
    copies: bool = False,
) -> list[Piece]:
    """What this rank writes of model and optimizer.

    Args:
        differing: buffers that are not equal on all ranks, from `differing_buffers`.
        copies: also what other ranks write, where this one has a copy of it.
    """
    found = list(_parameter_pieces(handle, frozen, copies))
    found += _buffer_pieces(handle, differing, copies)
    if update is not None:
        found += _state_pieces(handle, update, copies)
        for name, tensor in update.rank_tensors(saving=True).items():
            found.append(_whole_piece(_rank_state_name(handle.comm.rank, name), TensorKind.RANK_OPTIMIZER, tensor))
    return found


def _saved_range(group: Group, copies: bool) -> tuple[int, int]:
    """The elements of a group that this rank saves; none in the further copies of a state, unless these are saved."""
    if not (group.counted or copies):
        return 0, 0
    return group.plan.layout.shard_range(group.rank)


def _parameter_pieces(handle: Handle, frozen: bool, copies: bool) -> Iterator[Piece]:
    for unit in handle.runtime.units:
        for group in unit.groups:
            if not (frozen or group.plan.trainable):
                continue
            layout = group.plan.layout
            start, end = _saved_range(group, copies)
            for index, low, high in layout.pieces(start, end):
                segment = layout.segments[index]
                first = start + low - segment.offset
                values = partial(_parameter_values, group, segment.offset)
                piece = Piece(_parameter_info(group, index), first, first + high - low, values)
                yield from whole_pieces(handle, segment, piece)
            for index, segment in enumerate(layout.segments):
                if not segment.numel and (handle.comm.mesh.rank == 0 or copies) and not group.on_earlier_stage:
                    yield Piece(_parameter_info(group, index), 0, 0, partial(_parameter_values, group, 0))


def _parameter_info(group: Group, index: int) -> TensorInfo:
    segment, compute = group.plan.layout.segments[index], group.dtype
    stored = torch_dtype(state_dtype(group.plan.param.dtype)) if group.master is not None else compute
    return TensorInfo(
        segment.name, TensorKind.PARAMETER, stored, tuple(segment.whole_shape), compute, trainable=group.plan.trainable
    )


def _parameter_values(group: Group, offset: int, low: int, high: int) -> torch.Tensor:
    """Elements [low, high) of the parameter that begins at `offset` of the group."""
    start = offset + low - rank_range(group)[0]
    return read_values(group, slice(start, start + high - low))


def _buffer_pieces(handle: Handle, differing: Container[str], copies: bool) -> Iterator[Piece]:
    """Buffers of rank 0, and those of other ranks that are not the same (statistics of a batch norm)."""
    tied = handle.runtime.tied
    for name, buffer in persistent_buffers(handle.runtime.model).items():
        if (handle.comm.mesh.rank == 0 or copies) and not (tied is not None and tied.on_earlier_stage(name)):
            yield _whole_piece(name, TensorKind.BUFFER, buffer)
        elif name in differing:
            yield _whole_piece(_rank_name(handle.comm.rank, name), TensorKind.RANK_BUFFER, buffer)


def _whole_piece(name: str, kind: TensorKind, buffer: torch.Tensor) -> Piece:
    info = TensorInfo(name, kind, buffer.dtype, tuple(buffer.shape))
    return Piece(info, 0, buffer.numel(), partial(_buffer_values, buffer))


def _buffer_values(buffer: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return buffer.reshape(-1)[low:high]


def _rank_name(rank: int, name: str) -> str:
    return f"rank.{rank}.{name}"


def _rank_state_name(rank: int, name: str) -> str:
    return f"rank.{rank}.optimizer.{name}"


def buffer_sums(handle: Handle) -> dict[str, int]:
    """A checksum of each buffer here; nothing with a single rank."""
    if handle.comm.control.size == 1:
        return {}
    return {
        name: zlib.crc32(buffer.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for name, buffer in persistent_buffers(handle.runtime.model).items()
    }


def differing_buffers(handle: Handle, sums: Mapping[str, int]) -> set[str]:
    """Names of the buffers that are not equal on all ranks, by their `buffer_sums`; called by all ranks."""
    if not sums:
        return set()
    control, values = handle.comm.control, list(sums.values())
    bounds = torch.tensor([values, [-value for value in values]], dtype=torch.int64, device=handle.device)
    control.wait(control.all_reduce(bounds, LABEL, op=dist.ReduceOp.MAX))
    low, high = (-bounds[1]).tolist(), bounds[0].tolist()
    return {name for name, least, most in zip(sums, low, high, strict=True) if least != most}


def _state_pieces(handle: Handle, update: SavedState, copies: bool) -> Iterator[Piece]:
    regions = _regions(handle)
    for part in update.state_parts():
        group = regions[part.region]
        segment = group.plan.layout.segments[part.index]
        begin = update_range(group)[0] + part.low - segment.offset
        start, end = (position - segment.offset for position in _saved_range(group, copies))
        start, end = max(start, begin), min(end, begin + part.high - part.low)
        if start >= end:
            continue
        for key, values in part.elements.items():
            info = TensorInfo(
                state_name(segment.name, key),
                TensorKind.OPTIMIZER,
                values.dtype,
                tuple(segment.whole_shape),
                of=segment.name,
                key=key,
            )
            yield from whole_pieces(handle, segment, Piece(info, start, end, partial(_part_values, values, begin)))
        for key, packed in part.packed.items():
            yield from _packed_pieces(segment, key, packed, start, end, begin)
        if start == 0 and writes_scalars(handle, segment):
            yield from _scalar_pieces(segment.name, part)


def _packed_pieces(
    segment: Segment, key: str, packed: PackedState, start: int, end: int, begin: int
) -> Iterator[Piece]:
    """What elements [start, end) of a state tensor are kept in; their memory begins at element `begin`."""
    for name, stored in packed.stored.items():
        of, per = f"{key}_{name}", stored.per
        info = TensorInfo(
            state_name(segment.name, of),
            TensorKind.OPTIMIZER,
            stored.values.dtype,
            _saved_shape(segment, per),
            of=segment.name,
            key=of,
        )
        yield Piece(info, start // per, end // per, partial(_part_values, stored.values, begin // per))


def _saved_shape(segment: Segment, per: int) -> tuple[int, ...]:
    """The shape of a saved tensor with one value for each `per` elements."""
    return tuple(segment.shape) if per == 1 else (segment.numel // per,)


def _scalar_pieces(parameter: str, part: StatePart) -> Iterator[Piece]:
    """The scalars of a parameter's state, saved by the rank that has its first element."""
    for key, value in part.scalars.items():
        kind = TensorKind.OPTIMIZER_SCALAR if isinstance(value, torch.Tensor) else TensorKind.OPTIMIZER_NUMBER
        tensor = value if isinstance(value, torch.Tensor) else _as_tensor(value, parameter, key)
        info = TensorInfo(state_name(parameter, key), kind, tensor.dtype, (), of=parameter, key=key)
        yield Piece(info, 0, 1, partial(_buffer_values, tensor))


def _as_tensor(number: bool | int | float, parameter: str, key: str) -> torch.Tensor:
    """A number of Python's without loss. Raises CheckpointError for one that 64 bits can't hold."""
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise CheckpointError(f"optimizer state {key!r} of {parameter!r} is {number}, which 64 bits can't hold")
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def _part_values(part: RowPart, begin: int, low: int, high: int) -> torch.Tensor:
    return part.values(low - begin, high - begin)


def _regions(handle: Handle) -> list[Group]:
    """Groups in the order of the optimizer's regions."""
    return [group for unit in handle.runtime.units for group in unit.trainable]


# What a rank loads.


def parameter_targets(handle: Handle) -> list[Target]:
    """What this rank takes over of parameters."""
    return [
        part_target(
            handle,
            segment,
            Target(segment.name, tuple(segment.shape), low, high, partial(_write_parameter, group, segment.offset)),
        )
        for unit in handle.runtime.units
        for group in unit.groups
        for index, segment in enumerate(group.plan.layout.segments)
        for low, high in [_overlap(group, index)]
    ]


def _overlap(group: Group, index: int) -> tuple[int, int]:
    """The elements of a parameter that this rank holds; (0, 0) where it holds none."""
    segment, (start, end) = group.plan.layout.segments[index], rank_range(group)
    low, high = max(0, start - segment.offset), min(segment.numel, end - segment.offset)
    return (low, high) if low < high else (0, 0)


def _write_parameter(group: Group, offset: int, low: int, values: torch.Tensor) -> None:
    start = offset + low - rank_range(group)[0]
    write_values(group, slice(start, start + values.numel()), values)


def buffer_targets(handle: Handle, reader: StateReader) -> list[Target]:
    """Buffers: this rank's own where the checkpoint has them and is of as many ranks, else rank 0's."""
    rank, same = handle.comm.rank, reader.manifest.world_size == handle.comm.ranks
    found: list[Target] = []
    for name, buffer in persistent_buffers(handle.runtime.model).items():
        own = _rank_name(rank, name)
        source = own if same and has(reader, own) else name
        found.append(Target(source, tuple(buffer.shape), 0, buffer.numel(), partial(_write_buffer, buffer)))
    return found


def _write_buffer(buffer: torch.Tensor, low: int, values: torch.Tensor) -> None:
    if buffer.is_contiguous():
        buffer.view(-1)[low : low + values.numel()].copy_(values)
    else:
        whole = buffer.contiguous()
        whole.view(-1)[low : low + values.numel()].copy_(values)
        buffer.copy_(whole)


@dataclass
class _PartLoad:
    """The load of one parameter's state in one region: the saved values, and after `open` the rows to write."""

    region: int
    index: int
    dtypes: dict[str, torch.dtype]
    scalars: dict[str, Scalar]
    rows: dict[str, RowPart] = field(default_factory=dict)


class StateLoad:
    """The optimizer state that this rank takes over.

    Attributes:
        problems: why the checkpoint's optimizer state can't be loaded into this run.
        targets: to be written to after `open`.
    """

    def __init__(self, handle: Handle, update: SavedState, reader: StateReader) -> None:
        self.problems: list[str] = []
        self.targets: list[Target] = []
        self._handle, self._update = handle, update
        self._parts: list[_PartLoad] = []
        saved = _saved_state(reader)
        for number, group in enumerate(_regions(handle)):
            start, end = update_range(group)
            for index, low, high in group.plan.layout.pieces(start, end):
                segment = group.plan.layout.segments[index]
                infos = saved.get(reader.aliases.get(segment.name, segment.name), {})
                begin = start + low - segment.offset
                if infos:
                    self._add(reader, _PartLoad(number, index, {}, {}), segment, infos, (begin, begin + high - low))
                known = update.state_keys(number)
                names = {key for key, info in infos.items() if info.kind is TensorKind.OPTIMIZER}
                if infos and known is not None and names != set(known):
                    self.problems.append(
                        f"optimizer state of {segment.name!r} is {_listed(names)} there, and {_listed(known)} in this "
                        "run: it was saved with another optimizer"
                    )

        self._add_own(reader, handle.comm.rank, handle.comm.ranks)

    def _add_own(self, reader: StateReader, rank: int, world_size: int) -> None:
        """State that only the same rank of as many ranks can go on from."""
        if reader.manifest.world_size != world_size:
            return
        for name, tensor in self._update.rank_tensors(saving=False).items():
            saved = _rank_state_name(rank, name)
            if has(reader, saved) and reader.tensor(saved).shape == tuple(tensor.shape):
                write = partial(_write_buffer, tensor)
                self.targets.append(Target(saved, tuple(tensor.shape), 0, tensor.numel(), write))

    def _add(
        self,
        reader: StateReader,
        part: _PartLoad,
        segment: Segment,
        infos: Mapping[str, TensorInfo],
        held: tuple[int, int],
    ) -> None:
        self._parts.append(part)
        for key, info in infos.items():
            if info.kind is not TensorKind.OPTIMIZER:
                value = reader.tensor(info.name).read()
                part.scalars[key] = value if info.kind is TensorKind.OPTIMIZER_SCALAR else value.item()
                continue
            part.dtypes[key] = info.dtype
            per = self._update.elements_per_value(part.region, key)
            low, high = (position // per for position in held)
            write = partial(_write_state, part, key, low)
            target = Target(info.name, _saved_shape(segment, per), low, high, write)
            self.targets.append(part_target(self._handle, segment, target))

    def open(self) -> None:
        """Reset the optimizer's state and allocate the loaded state. This is the first change of a load."""
        self._update.reset_state()
        for part in self._parts:
            part.rows.update(self._update.open_part(part.region, part.index, part.dtypes, part.scalars))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _write_state(part: _PartLoad, key: str, begin: int, low: int, values: torch.Tensor) -> None:
    part.rows[key].store(values, low - begin)


def _saved_state(reader: StateReader) -> dict[str, dict[str, TensorInfo]]:
    """The checkpoint's optimizer state: parameter -> key -> tensor."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for info in reader.manifest.tensors.values():
        if info.kind.of_optimizer:
            found.setdefault(info.of, {})[info.key] = info
    return found

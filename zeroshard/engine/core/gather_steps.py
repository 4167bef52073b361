"""Turns the gather legs of a plan into steps for the gather stream: one function per leg, bound to its buffers.

    leg        READ    COPY    ENCODE, DIFFER    all-gather, by collectives or copies    DECODE, ADD
    step       a function on tensors that were looked up in advance, and the buffer names for hazard checks

The steps are made when a plan is adopted, so that a gather only runs a flat list. Only a gather into memory outside of
the slots makes its list when it runs. Rejected: a class per leg, which would hold what the functions close over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.peers import Peers
from zeroshard.engine.core.parameter_reads import ParameterReads
from zeroshard.engine.core.streams import Buffers, Launch, Step, Work
from zeroshard.engine.memory.block_codes import decode, encode
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.storage import Storage
from zeroshard.engine.memory.unit import Unit
from zeroshard.mesh import Axes
from zeroshard.plan.legs import Buffer, GroupLegs, Leg, LegKind, Route
from zeroshard.sharding.slots import Outdated


class GatherSteps:
    """Makes the steps of gathers.

    Args:
        legs: of each unit's groups.
        gathers: the gather communicators, by mesh axes.
        reads: brings parameters from disk.
        peers: the peer memory in which the shards are, where ranks copy from each other instead.
    """

    def __init__(
        self,
        legs: Sequence[Sequence[GroupLegs]],
        storage: Storage,
        gathers: Mapping[Axes, Collectives],
        reads: ParameterReads,
        peers: Peers | None,
    ) -> None:
        self._legs, self._gathers, self._reads, self._peers = legs, gathers, reads, peers
        self._all_records = storage.records

    def into(self, unit: Unit, wholes: Iterable[torch.Tensor], name: Hashable, outdated: Outdated) -> list[Step]:
        """The steps that gather the groups of a unit into `wholes`; hazard checks know this buffer as `name`."""
        found: list[Step] = []
        for group, legs, whole in zip(unit.groups, self._legs[unit.index], wholes, strict=True):
            second = (("second", unit.index),)
            for leg in legs.renewal(outdated, trainable=group.plan.trainable):
                writes = (*second, name) if leg.target is Buffer.WHOLE else second
                found.append(self._step(unit, group, leg, whole, writes))
            found += [self._step(unit, group, leg, whole, (name,)) for leg in legs.gather]
        return found

    def _step(self, unit: Unit, group: Group, leg: Leg, whole: torch.Tensor, writes: Buffers) -> Step:
        part = ("second" if leg.source is Buffer.SECOND else "shard", unit.index)
        makers = {
            LegKind.READ: self._read,
            LegKind.COPY: self._copy,
            LegKind.ENCODE: self._encode,
            LegKind.DIFFER: self._encode,
            LegKind.DECODE: self._decode,
            LegKind.ADD: self._decode,
        }
        make = makers.get(leg.kind, self._all_gather)
        return Step(make(unit, group, leg, whole), (part,), writes, sends=bool(leg.axes))

    def _read(self, unit: Unit, group: Group, leg: Leg, whole: torch.Tensor) -> Work:
        return partial(self._reads.wait_for, unit.index)

    def _copy(self, unit: Unit, group: Group, leg: Leg, whole: torch.Tensor) -> Work:
        target = _own_part(group, leg.target, whole)
        if leg.source is Buffer.WINDOW:
            return lambda: target.copy_(self._reads.shard_in_window(unit.index, group), non_blocking=True)
        return lambda: target.copy_(group.shard, non_blocking=True)

    def _encode(self, unit: Unit, group: Group, leg: Leg, whole: torch.Tensor) -> Work:
        source = group.shard if leg.source is Buffer.SHARD else _own_part(group, leg.source, whole)
        if leg.kind is LegKind.DIFFER:
            blocks, had = group.plan.differences, _own_part(group, Buffer.SECOND, whole)
            assert blocks is not None
            record = self._own_record(group, group.plan.record_of(blocks) * group.plan.records)
            return lambda: encode(source.float() - had, record, blocks)
        blocks = group.plan.codes
        assert blocks is not None
        record = self._own_record(group, group.plan.record_of(blocks) * group.plan.records)
        return lambda: encode(source, record, blocks)

    def _decode(self, unit: Unit, group: Group, leg: Leg, whole: torch.Tensor) -> Work:
        target = whole if leg.target is Buffer.WHOLE else _second(group)
        adds = leg.kind is LegKind.ADD
        ranks, blocks = group.plan.records, group.plan.differences if adds else group.plan.codes
        assert blocks is not None
        records = self._records(group.plan.record_of(blocks) * ranks)
        return lambda: decode(records, ranks, target, blocks, add=adds)

    def _records(self, nbytes: int) -> torch.Tensor:
        assert self._all_records is not None
        return self._all_records[:nbytes]

    def _own_record(self, group: Group, nbytes: int) -> torch.Tensor:
        position = group.rank % group.plan.records
        return self._records(nbytes).view(group.plan.records, -1)[position]

    def _all_gather(self, unit: Unit, group: Group, leg: Leg, whole: torch.Tensor) -> Launch:
        gathers, label = self._gathers[leg.axes], unit.label
        if leg.route is Route.COPIES and whole is group.whole:
            assert self._peers is not None
            assert whole.nbytes == leg.nbytes, (leg, whole.nbytes)
            return self._peers.all_gather(whole, group.shard, label, group.copied)
        if leg.source is Buffer.RECORDS:
            records, record = self._records(leg.nbytes), self._own_record(group, leg.nbytes)
            return lambda: gathers.all_gather(records, record, label)
        target = whole if leg.target is Buffer.WHOLE else _second(group)
        if leg.source is Buffer.SHARD:
            own = group.shard
        elif leg.source is leg.target:
            own = _own_part(group, leg.target, whole)
        else:
            own = _second(group)
        assert target.nbytes == leg.nbytes, (leg, target.nbytes)  # traffic and clocks are counted from legs
        target, own = (_as_bytes(tensor) if group.plan.scaled else tensor for tensor in (target, own))
        return lambda: gathers.all_gather(target, own, label)


def _as_bytes(codes: torch.Tensor) -> torch.Tensor:
    """The codes as uint8, a dtype that every backend can send."""
    return codes.view(torch.uint8)


def _second(group: Group) -> torch.Tensor:
    assert group.second is not None
    return group.second


def _own_part(group: Group, buffer: Buffer, whole: torch.Tensor) -> torch.Tensor:
    """The place of this rank's shard in the whole, or in the second copy."""
    start, end = group.plan.layout.shard_range(group.rank)
    if buffer is Buffer.WHOLE:
        return whole[start:end]
    first, _ = group.plan.second_range(group.rank)
    return _second(group)[start - first : end - first]

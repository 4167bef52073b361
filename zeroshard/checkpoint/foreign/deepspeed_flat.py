"""Finds parameters in the partitions of DeepSpeed's ranks.

Stages 1 and 2: each optimizer group is one vector in equal partitions; partition R is in rank R's file, without the
padding at the end.

    | embed ......... | pad | first ... | second ............ | pad |
    | partition of rank 0        | partition of rank 1              |

A parameter has one piece in each partition that it reaches into. `param_alignment_paddings` has the padding between
parameters.

Stage 3: each parameter is divided into equal parts, and a rank's file has its parts one after the other, in
sub-groups:

    rank 0   | embed, 1st half | | first, 1st half | second, 1st half |
    rank 1   | embed, 2nd half | | first, 2nd half | second, 2nd half |

The last part is padded. Moments are divided like the master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.foreign.contents import Contents, Group, Parameter, plain
from zeroshard.checkpoint.foreign.deepspeed_common import Common, Files, mapping, scaler_of
from zeroshard.checkpoint.foreign.deepspeed_experts import ExpertName, stack_name, stacked
from zeroshard.checkpoint.foreign.deepspeed_experts import frozen as frozen_experts
from zeroshard.checkpoint.foreign.inert import Inert, Name
from zeroshard.checkpoint.foreign.stored import Joined, Lazy, Piece, StoredTensor, numel
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.errors import CheckpointError

WEIGHT = "fp32"
_STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}


@dataclass(frozen=True)
class Part:
    """A rank's part of a flat group: master weights and moments, 1-D, by name. `length` includes padding."""

    tensors: Mapping[str, Lazy]
    length: int


@dataclass(frozen=True)
class RankState:
    """The content of one rank's optimizer file."""

    path: Path
    state: Mapping[str, Any]

    @property
    def stage(self) -> int:
        """The ZeRO stage, 1, 2 or 3. The bf16 optimizer, whose layout is that of stage 1, does not store it."""
        value = self.state.get("zero_stage", 1)
        if isinstance(value, Inert) and len(value.args) == 1:  # the enum, by value
            value = value.args[0]
        elif isinstance(value, Inert) and len(value.args) == 2 and isinstance(value.args[0], Name):  # by name
            value = _STAGES.get(value.args[1])
        if type(value) is not int or value not in (1, 2, 3):
            raise CheckpointError(f"{self.path}: ZeRO stage {value!r} is not imported")
        return value

    def base(self) -> Mapping[str, Any]:
        """The state of the base optimizer: `state` by flat group, and `param_groups`."""
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        value = self.state.get(key)
        if isinstance(value, list):  # DeepSpeed's "elastic" form: a list of states, without hyper-parameters
            return {"state": dict(enumerate(value)), "param_groups": []}
        return mapping(value, self.path, key)

    def parts(self) -> list[Part]:
        """This rank's part of each flat group."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        weights = self.state.get(key)
        if not isinstance(weights, list):
            raise CheckpointError(f"{self.path} holds no {key}: it is no ZeRO checkpoint of DeepSpeed")
        # The optimizer of stages 1 and 2 removes the padding, the bf16 optimizer (which stores no stage) keeps it.
        paddings = self.state.get("group_paddings") if self.stage != 3 and "zero_stage" in self.state else None
        states = mapping(self.base().get("state"), self.path, "state")
        found = []
        for index, weight in enumerate(weights):
            if not isinstance(weight, StoredTensor) or len(weight.shape) != 1:
                raise CheckpointError(f"{self.path}: group {index} has no flat master weights (they are on NVMe?)")
            padding = paddings[index] if isinstance(paddings, list) and index < len(paddings) else 0
            length = weight.shape[0] + (padding if type(padding) is int else 0)
            tensors: dict[str, Lazy] = {WEIGHT: weight}
            for name, value in mapping(states.get(index, {}), self.path, "state").items():
                if isinstance(value, StoredTensor) and len(value.shape) == 1 and name != "step":
                    if value.shape[0] < weight.shape[0]:
                        raise CheckpointError(
                            f"{self.path}: {name} of group {index} has {value.shape[0]} elements, its weights "
                            f"{weight.shape[0]}; if they were offloaded to NVMe, they are not in this file"
                        )
                    tensors[str(name)] = value
            found.append(Part(tensors, length))
        return found

    def step(self, index: int) -> float | None:
        """The number of updates of flat group `index`; None if it is not known."""
        base = self.base()
        found = mapping(base.get("state"), self.path, "state").get(index, {})
        value = found.get("step") if isinstance(found, dict) else None
        if value is None:
            value = self.state.get("base_optimizer_state_step")
        for group in base.get("param_groups") or ():  # DeepSpeed's fused Adam counts by group
            if value is None and isinstance(group, dict) and index in group.get("params", ()):
                value = group.get("step")
        if isinstance(value, StoredTensor) and numel(value.shape) == 1:
            return float(value.read().item())
        return float(value) if isinstance(value, (int, float)) else None


def open_flat(files: Files, common: Common) -> Contents:
    """The contents of a ZeRO checkpoint of stage 1, 2 or 3. Raises CheckpointError."""
    ranks = [RankState(path, _optimizer_state(path)) for _, path in sorted(files.optim.items())]
    world = len(ranks)
    stage = ranks[0].stage
    _check_ranks(files, ranks, stage)
    left_out: list[str] = []
    parts = [rank.parts() for rank in ranks]
    if any(len(part) != len(common.shapes) for part in parts):
        raise CheckpointError(
            f"{files.folder}: ranks have {[len(p) for p in parts]} flat groups, not {len(common.shapes)}"
        )
    parameters: dict[str, Parameter] = {}
    counts = _partition_counts(ranks[0], len(common.shapes), world)
    for index, shapes in enumerate(common.shapes):
        experts = {name: shape for name, shape in shapes.items() if ExpertName.of(name) is not None}
        if experts:
            parameters |= _experts(files, common, ranks, index, counts[index], experts)
        if counts[index] < world:
            continue
        group = [part[index] for part in parts]
        paddings = _alignment(ranks[0], index, len(shapes))
        layout = _pieces_3(shapes, world) if stage == 3 else _pieces_12(shapes, group, paddings, files.folder)
        names = [key for key in group[0].tensors if all(key in part.tensors for part in group)]
        for name, shape in shapes.items():
            if name in experts:
                continue
            joined = {key: _join(layout(name), group, key, shape, files.folder, name) for key in names}
            weight = joined.pop(WEIGHT)
            parameters[name] = Parameter(name, weight, joined, ranks[0].step(index), compute=common.compute_dtype(name))
    parameters |= frozen_experts(files.experts, parameters, files.folder)
    if stage == 3:
        parameters |= frozen_3(files, common, world)
        left_out += [f"{name}: it was excluded at the save" for name in common.excluded(parameters)]
    else:
        parameters |= common.whole_frozen(left_out)
    version = common.state.get("ds_version")
    return common.contents(
        f"DeepSpeed {version}, ZeRO stage {stage}, {world} ranks",
        parameters,
        left_out,
        groups=groups_of(ranks[0].base().get("param_groups"), common, stage, left_out),
        scaler=scaler_of(ranks[0].state.get("loss_scaler")),
    )


def _optimizer_state(path: Path) -> Mapping[str, Any]:
    return mapping(mapping(load(path), path, "the content").get("optimizer_state_dict"), path, "optimizer_state_dict")


def _partition_counts(rank: RankState, groups: int, world: int) -> list[int]:
    """The number of ranks that divide each flat group; experts are divided over the ranks that have the same ones."""
    counts = rank.state.get("partition_count")
    return counts if isinstance(counts, list) and len(counts) == groups else [world] * groups


def _experts(
    files: Files,
    common: Common,
    ranks: list[RankState],
    index: int,
    count: int,
    experts: Mapping[str, tuple[int, ...]],
) -> dict[str, Parameter]:
    """The experts in a flat group; `count` ranks have the same ones."""
    config = common.state.get("ds_config")
    if isinstance(config, dict) and config.get("use_data_before_expert_parallelism"):
        raise CheckpointError(
            f"{files.folder}: experts that were divided with use_data_before_expert_parallelism are not imported"
        )
    shapes, parts = common.shapes[index], len(ranks) // count
    paddings = _alignment(ranks[0], index, len(shapes))
    groups = [[rank.parts()[index] for rank in ranks[part::parts]] for part in range(parts)]
    layouts = [_pieces_12(shapes, group, paddings, files.folder) for group in groups]
    names = [key for key in groups[0][0].tensors if all(key in one.tensors for group in groups for one in group)]

    def read(part: int, name: str) -> Mapping[str, Lazy]:
        group, pieces = groups[part], layouts[part](name)
        return {key: _join(pieces, group, key, shapes[name], files.folder, name) for key in names}

    if parts > 1 and len(experts) < len(shapes):
        raise CheckpointError(
            f"{files.folder}: flat group {index} holds experts of some ranks, and what all ranks have"
        )
    return stacked(experts, parts, read, ranks[0].step(index), files.experts, files.folder)


def _check_ranks(files: Files, ranks: list[RankState], stage: int) -> None:
    counts = ranks[0].state.get("partition_count")
    counts = counts if isinstance(counts, list) else [counts]
    world = len(ranks)
    wrong = [count for count in counts if type(count) is not int or count < 1 or world % count]
    fewer = [count for count in counts if count != world]
    if sorted(files.optim) != list(range(world)) or wrong or (fewer and not files.experts):
        raise CheckpointError(
            f"{files.folder} was saved by {counts} ranks but holds the optimizer files of {sorted(files.optim)}: files "
            "are missing, or are left from an earlier save (MiCS is not imported)"
        )
    if any(rank.stage != stage for rank in ranks):
        raise CheckpointError(f"{files.folder} holds files of several ZeRO stages: {[rank.stage for rank in ranks]}")


def _alignment(rank: RankState, index: int, count: int) -> list[int]:
    paddings = rank.state.get("param_alignment_paddings")
    if paddings is None:
        return [0] * count
    found = paddings[index] if isinstance(paddings, list) and index < len(paddings) else None
    if not isinstance(found, list) or len(found) != count or not all(type(p) is int and p >= 0 for p in found):
        raise CheckpointError(f"{rank.path} is damaged: its paddings do not match the parameters")
    return found


Pieces = Callable[[str], list[tuple[int, int, int]]]  # name -> (rank, start, count)


def _pieces_12(shapes: Mapping[str, tuple[int, ...]], group: list[Part], paddings: list[int], where: Path) -> Pieces:
    size = group[0].length
    if any(part.length != size for part in group):
        raise CheckpointError(f"{where}: partitions of one group have lengths {[part.length for part in group]}")
    offsets: dict[str, tuple[int, int]] = {}
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        offsets[name] = (at, numel(shape))
        at += numel(shape) + padding
    if at > size * len(group):
        raise CheckpointError(f"{where}: the parameters have {at} elements, their partitions {size * len(group)}")

    def pieces(name: str) -> list[tuple[int, int, int]]:
        start, count = offsets[name]
        found = []
        for rank in range(len(group)):
            first, last = max(start, rank * size), min(start + count, (rank + 1) * size)
            if first < last:
                found.append((rank, first - rank * size, last - first))
        return found

    return pieces


def _pieces_3(shapes: Mapping[str, tuple[int, ...]], world: int) -> Pieces:
    offsets: dict[str, tuple[int, int]] = {}
    at = 0
    for name, shape in shapes.items():
        offsets[name] = (at, numel(shape))
        at += -(-numel(shape) // world)

    def pieces(name: str) -> list[tuple[int, int, int]]:
        start, count = offsets[name]
        return [(rank, start, length) for rank, length in enumerate(_split(count, world)) if length]

    return pieces


def _split(count: int, world: int) -> list[int]:
    """The number of elements of a parameter on each rank at stage 3, without padding."""
    part = -(-count // world)
    return [max(0, min(part, count - rank * part)) for rank in range(world)]


def _join(
    pieces: list[tuple[int, int, int]], group: list[Part], key: str, shape: tuple[int, ...], where: Path, name: str
) -> Joined:
    tensors = [group[rank].tensors[key] for rank, _, _ in pieces]
    dtype = group[0].tensors[key].dtype
    try:
        found = tuple(Piece(t, start, count) for t, (_, start, count) in zip(tensors, pieces, strict=True))
        return Joined(shape, found, dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {key} of {name!r}: {error}") from error


def frozen_3(files: Files, common: Common, world: int) -> dict[str, Parameter]:
    """Frozen parameters of stage 3: each rank's model file has its part of each."""
    if not common.frozen_shapes:
        return {}
    if sorted(files.model) != list(range(world)):
        raise CheckpointError(
            f"{files.folder}: model files of ranks {sorted(files.model)}, of {world}: some are missing"
        )
    fragments = [mapping(common.state.get("frozen_param_fragments"), common.path, "frozen_param_fragments")]
    for rank in range(1, world):
        path = files.model[rank]
        state = mapping(load(path), path, "the content")
        fragments.append(mapping(state.get("frozen_param_fragments"), path, "frozen_param_fragments"))
    found = {}
    for name, shape in common.frozen_shapes.items():
        parts = [fragment.get(name) for fragment in fragments]
        tensors = [part for part in parts if isinstance(part, StoredTensor)]
        if len(tensors) != world:
            raise CheckpointError(f"{files.folder}: frozen parameter {name!r} is missing in the file of a rank")
        lengths = _split(numel(shape), world)
        pieces = tuple(Piece(t, 0, length) for t, length in zip(tensors, lengths, strict=True) if length)
        try:
            found[name] = Parameter(name, Joined(shape, pieces, tensors[0].dtype), trainable=False)
        except CheckpointError as error:
            raise CheckpointError(f"{files.folder}: frozen parameter {name!r}: {error}") from error
    return found


def groups_of(value: Any, common: Common, stage: int, left_out: list[str]) -> tuple[Group, ...]:
    """Optimizer groups with the names of their parameters. At stage 3 a group has several flat groups."""
    found = []
    for index, group in enumerate(value if isinstance(value, list) else []):
        options = mapping(group, common.path, "param_groups")
        flat = options.get("params", [index]) if stage == 3 else [index]
        if not all(type(number) is int and 0 <= number < len(common.shapes) for number in flat):
            raise CheckpointError(f"{common.path}: optimizer group {index} has flat groups {flat}, which are not there")
        names = tuple(dict.fromkeys(stack_name(name) for number in flat for name in common.shapes[number]))
        kept = {key: item for key, item in options.items() if key != "params"}
        found.append(Group(names, plain(kept, f"param_groups[{index}]", left_out)))
    return tuple(found)

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.foreign.contents import Contents, Group, Parameter, plain
from zeroshard.checkpoint.foreign.deepspeed_common import Common, Files, check_same, mapping, scaler_of, step_count
from zeroshard.checkpoint.foreign.deepspeed_experts import ExpertName, stack_name, stacked
from zeroshard.checkpoint.foreign.deepspeed_experts import frozen as frozen_experts
from zeroshard.checkpoint.foreign.inert import Inert, Name
from zeroshard.checkpoint.foreign.stored import Joined, Lazy, Piece, StoredTensor, chunks, numel
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.errors import CheckpointError

WEIGHT = "fp32"
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_LOOKED_AT, _FEWEST = 1024, 8
_ALIGNED = 2
"""DeepSpeed makes flat groups a multiple of so many times the number of ranks."""
_STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}


@dataclass(frozen=True)
class Part:
    """A rank's part of a flat group.

    Attributes:
        tensors: master weights and moments, 1-D, by name.
        length: with padding.
        padding: how much of it is padding; None if that is not told. DeepSpeed tells of all padding on the last rank,
            so this may be more than that rank has.
    """

    tensors: Mapping[str, Lazy]
    length: int
    padding: int | None


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
        paddings = self.state.get("group_paddings") if self.stage != 3 else None
        removed = "zero_stage" in self.state
        states = mapping(self.base().get("state"), self.path, "state")
        found = []
        for index, weight in enumerate(weights):
            if not isinstance(weight, StoredTensor) or len(weight.shape) != 1:
                raise CheckpointError(f"{self.path}: group {index} has no flat master weights (they are on NVMe?)")
            padding = paddings[index] if isinstance(paddings, list) and index < len(paddings) else None
            if padding is not None and (type(padding) is not int or padding < 0):
                raise CheckpointError(f"{self.path} is damaged: the padding of group {index} is {padding!r:.80}")
            length = weight.shape[0] + (padding if padding and removed else 0)
            tensors: dict[str, Lazy] = {WEIGHT: weight}
            for name, value in mapping(states.get(index, {}), self.path, "state").items():
                if isinstance(value, StoredTensor) and self._is_moment(str(name), value, weight, index):
                    tensors[str(name)] = value
            found.append(Part(tensors, length, padding))
        return found

    def _is_moment(self, name: str, value: StoredTensor, weight: StoredTensor, index: int) -> bool:
        """Whether a state has a number for each weight; a single number of another name than moments have is none."""
        if name == "step" or (name not in _MOMENTS and (not value.shape or value.shape == (1,) != weight.shape)):
            return False
        if len(value.shape) != 1 or value.shape[0] < weight.shape[0]:
            raise CheckpointError(
                f"{self.path}: {name} of group {index} has shape {list(value.shape)}, its weights "
                f"{list(weight.shape)}; if they were offloaded to NVMe, they are not in this file"
            )
        return True

    def step(self, index: int) -> float | None:
        """The number of updates of flat group `index`; None if it is not known."""
        base = self.base()
        states = mapping(base.get("state"), self.path, "state")
        value = mapping(states.get(index, {}), self.path, f"the state of flat group {index}").get("step")
        if value is None:
            value = self.state.get("base_optimizer_state_step")
        for group in base.get("param_groups") or ():  # DeepSpeed's fused Adam counts by group
            if value is None and isinstance(group, dict) and index in group.get("params", ()):
                value = group.get("step")
        return step_count(value, self.path)

    def options(self) -> list[Any]:
        """Hyper-parameters by optimizer group."""
        groups = self.base().get("param_groups") or ()
        return [plain(group, "param_groups", []) for group in groups]


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
    _check_one_state(ranks, parts, files.folder)
    if stage == 3:
        _check_different(parts, files.folder)
    parameters: dict[str, Parameter] = {}
    counts = _partition_counts(ranks[0], len(common.shapes), world)
    for index, shapes in enumerate(common.shapes):
        experts = {name: shape for name, shape in shapes.items() if ExpertName.of(name) is not None}
        if experts:
            parameters |= _experts(files, common, ranks, index, counts[index], experts)
        if experts and len(experts) == len(shapes):
            continue
        if counts[index] < world:
            raise CheckpointError(
                f"{files.folder}: {counts[index]} ranks divide flat group {index}, but {world} saved the checkpoint"
            )
        group = [part[index] for part in parts]
        paddings = _alignment(ranks[0], index, len(shapes))
        layout = (
            _pieces_3(shapes, group, files.folder) if stage == 3 else _pieces_12(shapes, group, paddings, files.folder)
        )
        names = list(group[0].tensors)
        for name, shape in shapes.items():
            if name in experts:
                continue
            joined = {key: _join(layout(name), group, key, shape, files.folder, name) for key in names}
            weight = common.rounded(name, joined.pop(WEIGHT))
            parameters[name] = Parameter(name, weight, joined, ranks[0].step(index), compute=common.compute_dtype(name))
    parameters |= frozen_experts(files.experts, parameters, files.folder)
    if stage == 3:
        parameters |= frozen_3(files, common, world)
        left_out += common.absent(parameters)
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
    names = list(groups[0][0].tensors)

    def read(part: int, name: str) -> Mapping[str, Lazy]:
        group, pieces = groups[part], layouts[part](name)
        return {key: _join(pieces, group, key, shapes[name], files.folder, name) for key in names}

    if parts > 1 and len(experts) < len(shapes):
        raise CheckpointError(
            f"{files.folder}: flat group {index} holds experts of some ranks, and what all ranks have"
        )
    return stacked(experts, parts, read, ranks[0].step(index), files)


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


def _check_one_state(ranks: Sequence[RankState], parts: Sequence[Sequence[Part]], where: Path) -> None:
    """Raise CheckpointError if ranks have different counts of steps, hyper-parameters, or names of moments."""
    check_same([rank.state.get("partition_count") for rank in ranks], "partition_count", where)
    check_same([rank.options() for rank in ranks], "param_groups", where)
    for index in range(len(parts[0])):
        check_same([rank.step(index) for rank in ranks], f"the step count of flat group {index}", where)
        check_same([sorted(part[index].tensors) for part in parts], f"the state of flat group {index}", where)


def _alignment(rank: RankState, index: int, count: int) -> list[int]:
    paddings = rank.state.get("param_alignment_paddings")
    if paddings is None:
        return [0] * count
    found = paddings[index] if isinstance(paddings, list) and index < len(paddings) else None
    if not isinstance(found, list) or len(found) != count or not all(type(p) is int and p >= 0 for p in found):
        raise CheckpointError(f"{rank.path} is damaged: its paddings do not match the parameters")
    return found


def _check_different(parts: Sequence[Sequence[Part]], where: Path) -> None:
    """Raise CheckpointError if two ranks have the same master weights in all flat groups.

    In some groups they may: norms and biases that are not trained yet.
    """
    seen: dict[bytes, int] = {}
    for rank, own in enumerate(parts):
        weights = [part.tensors[WEIGHT] for part in own]
        starts = [weight.read_flat(0, min(_LOOKED_AT, numel(weight.shape))) for weight in weights]
        if all(len(start) < _FEWEST or bool((start == start[:1]).all()) for start in starts):
            continue
        key = b"".join(bytes(start.view(torch.uint8).numpy().data) for start in starts)
        other = seen.setdefault(key, rank)
        others = [part.tensors[WEIGHT] for part in parts[other]]
        if other != rank and all(_equal(a, b) for a, b in zip(others, weights, strict=True)):
            raise CheckpointError(
                f"{where}: the optimizer files of ranks {other} and {rank} have the same weights, where each must have "
                "its own: one was copied over the other"
            )


def _equal(one: Lazy, other: Lazy) -> bool:
    pairs = zip(chunks(one), chunks(other), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


Pieces = Callable[[str], list[tuple[int, int, int]]]  # name -> (rank, start, count)


def _pieces_12(shapes: Mapping[str, tuple[int, ...]], group: list[Part], paddings: list[int], where: Path) -> Pieces:
    size = group[0].length
    # DeepSpeed tells the last rank of all padding, be it more than that rank has.
    if any(part.length != size and (part.padding or 0) <= size for part in group):
        raise CheckpointError(f"{where}: partitions of one group have lengths {[part.length for part in group]}")
    _check_lengths(group, size, where)
    offsets: dict[str, tuple[int, int]] = {}
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        offsets[name] = (at, numel(shape))
        at += numel(shape) + padding
    spare, told = size * len(group) - at, [part.padding for part in group if part.padding is not None]
    # Versions differ in whether they tell of the padding between parameters, and in their alignment.
    known = (sum(told), sum(told) - sum(paddings)) if len(told) == len(group) else ()
    if spare < 0 or (spare not in known and spare >= _ALIGNED * len(group)):
        raise CheckpointError(
            f"{where}: the parameters have {at} elements, their partitions {size * len(group)}, with {sum(told)} of "
            "padding: the model files and optimizer files are not of one save"
        )

    def pieces(name: str) -> list[tuple[int, int, int]]:
        start, count = offsets[name]
        found = []
        for rank in range(len(group)):
            first, last = max(start, rank * size), min(start + count, (rank + 1) * size)
            if first < last:
                found.append((rank, first - rank * size, last - first))
        return found

    return pieces


def _check_lengths(group: list[Part], size: int, where: Path) -> None:
    """Raise CheckpointError if a moment has neither as many elements as the weights, nor as these and padding."""
    for rank, part in enumerate(group):
        held = numel(part.tensors[WEIGHT].shape)
        for key, value in part.tensors.items():
            if numel(value.shape) not in (held, size):
                raise CheckpointError(
                    f"{where}: {key} of rank {rank} has {numel(value.shape)} elements in a flat group, "
                    f"its weights have {held}"
                )


def _pieces_3(shapes: Mapping[str, tuple[int, ...]], group: list[Part], where: Path) -> Pieces:
    world = len(group)
    offsets: dict[str, tuple[int, int]] = {}
    at = 0
    for name, shape in shapes.items():
        offsets[name] = (at, numel(shape))
        at += -(-numel(shape) // world)
    held = [part.length for part in group]
    if any(one != held[0] for one in held) or not at <= held[0] < at + world:
        raise CheckpointError(
            f"{where}: the parameters have {at} elements on each rank, the optimizer files {held}: the model files and "
            "optimizer files are not of one save"
        )
    _check_lengths(group, held[0], where)

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
        saves = [(one.get("global_steps"), one.get("global_samples")) for one in (common.state, state)]
        check_same(saves, f"(global_steps, global_samples) of {path.name}", files.folder)
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

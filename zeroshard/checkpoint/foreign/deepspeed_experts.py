"""Finds the experts of DeepSpeed's `MoE`: each rank has some of them, under the same names as other ranks.

    layer_L_expert_E_mp_rank_00_model_states.pt    expert E in the forward's dtype, E among all experts
    flat group of experts in rank R's file         the experts of rank R % ep, divided over the ranks that have the same

    ranks 0..3, ep 2, 4 experts       rank 0, 2: experts 0 1      rank 1, 3: experts 2 3

All experts of a layer become one parameter, as in `zeroshard.experts`: its first dim is the expert, and its name lacks
the expert's number. Rejected: a parameter per expert, which does not tell the layer that it belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroshard.checkpoint.foreign.contents import Parameter
from zeroshard.checkpoint.foreign.deepspeed_common import Files, must_round
from zeroshard.checkpoint.foreign.stored import Joined, Lazy, Piece, StoredTensor, numel
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.errors import CheckpointError

FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_00_model_states\.pt")
_NAME = re.compile(r"(.*\bdeepspeed_experts)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class ExpertName:
    """A parameter of one expert: the name of the stacked parameter, and the expert's number on its rank."""

    stack: str
    local: int

    @staticmethod
    def of(name: str) -> ExpertName | None:
        """The parts of a name; None for a parameter of no expert."""
        match = _NAME.fullmatch(name)
        return None if match is None else ExpertName(f"{match[1]}.{match[3]}", int(match[2]))


def stack_name(name: str) -> str:
    """The name of the stacked parameter that has an expert's parameter; the same name for other parameters."""
    found = ExpertName.of(name)
    return name if found is None else found.stack


Read = Callable[[int, str], Mapping[str, Lazy]]
"""Reads master weights and moments of a parameter from the ranks that have one part of the experts."""


def stacked(
    shapes: Mapping[str, tuple[int, ...]],
    parts: int,
    read: Read,
    step: float | None,
    files: Files,
) -> dict[str, Parameter]:
    """The parameters of one flat group of experts, stacked.

    Args:
        shapes: shapes of the parameters of one rank's experts.
        parts: the number of ranks that divide the experts of a layer.
        read: reads master weights and moments.
        step: the number of updates.
        files: the files of the checkpoint.

    Raises:
        CheckpointError: experts of a layer are missing.
    """
    members: dict[str, dict[int, str]] = {}
    where = files.folder
    for name in shapes:
        found = ExpertName.of(name)
        if found is None:
            raise CheckpointError(f"{where}: {name!r} is among the experts, but no expert's")
        members.setdefault(found.stack, {})[found.local] = name
    computed = _computed(files.experts, where)
    made: dict[str, Parameter] = {}
    for stack, names in members.items():
        if sorted(names) != list(range(len(names))) or len({shapes[name] for name in names.values()}) > 1:
            raise CheckpointError(
                f"{where}: the experts of a rank in {stack!r} have the numbers {sorted(names)}, or differ"
            )
        states = [read(part, names[local]) for part in range(parts) for local in range(len(names))]
        shape = (len(states), *shapes[names[0]])
        kept = {key: _stack([state[key] for state in states], shape, where) for key in states[0]}
        forward = computed.get(stack, {})
        if forward and not files.differ:
            masters = [
                must_round(state["fp32"], [one], f"{where}: the master weights of expert {number} of {stack!r}")
                for number, state in enumerate(states)
                if (one := forward.get(number)) is not None
            ]
            if len(masters) < len(states):
                raise CheckpointError(
                    f"{where}: of {len(states)} experts of {stack!r} the files {sorted(forward)} are there"
                )
            kept["fp32"] = _stack(masters, shape, where)
        dtype = next((one.dtype for one in forward.values()), None)
        made[stack] = Parameter(stack, kept.pop("fp32"), kept, step, compute=dtype)
    return made


def _stack(values: Sequence[Lazy], shape: tuple[int, ...], where: Path) -> Joined:
    try:
        return Joined(shape, tuple(Piece(value, 0, numel(value.shape)) for value in values), values[0].dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: experts of one layer differ: {error}") from error


def frozen(
    files: Mapping[int, Mapping[int, Path]], trained: Mapping[str, Parameter], where: Path
) -> dict[str, Parameter]:
    """Parameters of experts that were not trained, from the files of the experts."""
    found: dict[str, Parameter] = {}
    for layer, experts in files.items():
        _check_complete(layer, experts, where)
        states = [_of_expert(experts[number]) for number in range(len(experts))]
        for stack in states[0]:
            if stack in trained:
                continue
            values = [state[stack] for state in states if stack in state]
            if len(values) < len(states):
                raise CheckpointError(f"{where}: not all experts of layer {layer} have {stack!r}")
            shape = (len(values), *values[0].shape)
            found[stack] = Parameter(stack, _stack(values, shape, where), trainable=False)
    return found


def _check_complete(layer: int, experts: Mapping[int, Path], where: Path) -> None:
    if sorted(experts) != list(range(len(experts))):
        raise CheckpointError(f"{where}: of the experts of layer {layer} the files {sorted(experts)} are there")


def _of_expert(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one expert's file, by the names of the stacked parameters."""
    state = load(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(state).__name__}, not a dict")
    return {
        stack_name(name): value
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, StoredTensor)
    }


def _computed(files: Mapping[int, Mapping[int, Path]], where: Path) -> dict[str, dict[int, StoredTensor]]:
    """The forward's weights of each stacked parameter, by expert."""
    found: dict[str, dict[int, StoredTensor]] = {}
    for layer, experts in files.items():
        _check_complete(layer, experts, where)
        for number, path in sorted(experts.items()):
            for stack, value in _of_expert(path).items():
                found.setdefault(stack, {})[number] = value
    return found

"""Where the experts of DeepSpeed's `MoE` lie: each rank has some of them, under the same names as the others.

    layer_L_expert_E_mp_rank_00_model_states.pt    expert E as forward had it, E among all experts
    flat group of experts in rank R's file         that of the experts of rank R % ep, cut over the ranks with the same

    ranks 0..3, ep 2, 4 experts       rank 0, 2: experts 0 1      rank 1, 3: experts 2 3

All experts of a layer become one parameter with a dim for them in front, under the name without the expert's number, as
`zeroshard.experts` has them. Rejected: an expert a parameter, which says nothing of which layer they belong to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroshard.checkpoint.foreign.contents import Parameter
from zeroshard.checkpoint.foreign.stored import Joined, Lazy, Piece, StoredTensor, numel
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.errors import CheckpointError

FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_00_model_states\.pt")
_NAME = re.compile(r"(.*\bdeepspeed_experts)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class ExpertName:
    """A parameter of one expert: the name of the stack of all, and the expert's number on its rank."""

    stack: str
    local: int

    @staticmethod
    def of(name: str) -> ExpertName | None:
        """None for what is no parameter of an expert."""
        match = _NAME.fullmatch(name)
        return None if match is None else ExpertName(f"{match[1]}.{match[3]}", int(match[2]))


def stack_name(name: str) -> str:
    """The name of the stack that a parameter is in; its own where it is no expert's."""
    found = ExpertName.of(name)
    return name if found is None else found.stack


Read = Callable[[int, str], Mapping[str, Lazy]]
"""Master weights and moments of a parameter on the ranks of one part of the experts."""


def stacked(
    shapes: Mapping[str, tuple[int, ...]],
    parts: int,
    read: Read,
    step: float | None,
    files: Mapping[int, Mapping[int, Path]],
    where: Path,
) -> dict[str, Parameter]:
    """The parameters of one flat group of experts, stacked.

    Args:
        shapes: of the parameters of a rank's experts.
        parts: ranks over which the experts of a layer are divided.
        files: by layer and expert, what forward had.

    Raises:
        CheckpointError: experts of a layer are missing.
    """
    members: dict[str, dict[int, str]] = {}
    for name in shapes:
        found = ExpertName.of(name)
        if found is None:
            raise CheckpointError(f"{where}: {name!r} is among the experts, but no expert's")
        members.setdefault(found.stack, {})[found.local] = name
    dtypes = _dtypes(files)
    made: dict[str, Parameter] = {}
    for stack, names in members.items():
        if sorted(names) != list(range(len(names))) or len({shapes[name] for name in names.values()}) > 1:
            raise CheckpointError(
                f"{where}: the experts of a rank in {stack!r} have the numbers {sorted(names)}, or differ"
            )
        states = [read(part, names[local]) for part in range(parts) for local in range(len(names))]
        shape = (len(states), *shapes[names[0]])
        kept = {key: _stack([state[key] for state in states], shape, where) for key in states[0]}
        weight = kept.pop("fp32")
        made[stack] = Parameter(stack, weight, kept, step, compute=dtypes.get(stack))
    return made


def _stack(values: Sequence[Lazy], shape: tuple[int, ...], where: Path) -> Joined:
    try:
        return Joined(shape, tuple(Piece(value, 0, numel(value.shape)) for value in values), values[0].dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: experts of one layer differ: {error}") from error


def frozen(
    files: Mapping[int, Mapping[int, Path]], trained: Mapping[str, Parameter], where: Path
) -> dict[str, Parameter]:
    """Experts' parameters outside of the optimizer, from the files of the experts."""
    found: dict[str, Parameter] = {}
    for layer, experts in files.items():
        if sorted(experts) != list(range(len(experts))):
            raise CheckpointError(f"{where}: of the experts of layer {layer} the files {sorted(experts)} are there")
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


def _of_expert(path: Path) -> dict[str, StoredTensor]:
    """What forward had of one expert, by the names of the stacks."""
    state = load(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(state).__name__}, not a dict")
    return {
        stack_name(name): value
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, StoredTensor)
    }


def _dtypes(files: Mapping[int, Mapping[int, Path]]) -> dict[str, torch.dtype]:
    """What forward had each stack in, by the first expert of each layer."""
    first = (_of_expert(experts[min(experts)]) for experts in files.values())
    return {stack: value.dtype for state in first for stack, value in state.items()}

"""Reads the layers' files of a DeepSpeed pipeline: weights in the forward's dtype, buffers and frozen weights.

    layer_03-model_states.pt                {"weight": ..., "bias": ...}: parameters 3.weight and 3.bias
    layer_03-model_01-model_states.pt       the same, of tensor-parallel rank 1

Nothing in a file tells its stage: the ranks tell the names of their trained parameters and buffers. A tied layer's file
has its parameters without the key that ties it, so they are found by the rest of their name and by shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.foreign.deepspeed_common import mapping
from zeroshard.checkpoint.foreign.stored import StoredTensor
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.errors import CheckpointError

LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
TIED = re.compile(r"tied_modules\.[^.]+\.(.+)")

LayerFiles = Mapping[int, Mapping[int, Path]]
"""The file of each layer that has parameters or buffers, by tensor-parallel rank and number of the layer."""


def names_of(state: Mapping[str, Any]) -> list[str]:
    """Names of the trained parameters and of the buffers that one rank has."""
    return [*(name for group in state.get("param_shapes") or () for name in group), *(state.get("buffer_names") or ())]


def _numbers(state: Mapping[str, Any]) -> set[int]:
    """Numbers of the layers that one rank has names of."""
    first = (name.split(".", 1)[0] for name in names_of(state))
    return {int(number) for number in first if number.isdigit()}


@dataclass(frozen=True)
class Layers:
    """The tensors of the layers.

    Attributes:
        held: them, by tensor-parallel rank, number of the layer, and name; empty if there are no files.
        frozen: numbers of the layers that no rank has names of.
    """

    held: Sequence[Mapping[int, Mapping[Any, Any]]]
    frozen: frozenset[int]

    @staticmethod
    def read(files: LayerFiles, states: Sequence[Mapping[str, Any]], where: Path) -> Layers:
        """The tensors of all files, of a model whose ranks have these states.

        Raises:
            CheckpointError: a file is missing or damaged; it is named.
        """
        if sorted(files) != list(range(len(files))):
            raise CheckpointError(
                f"{where} holds layers of the tensor-parallel ranks {sorted(files)}: some are missing"
            )
        known = {number for state in states for number in _numbers(state)}
        every = known | {number for of_rank in files.values() for number in of_rank}
        for part, of_rank in files.items():
            gone = sorted(every - of_rank.keys())
            if gone:
                raise CheckpointError(
                    f"{where / _like(of_rank, gone[0], part)} is missing, which layer {gone[0]} is in"
                )
        held = [
            {number: mapping(load(files[part][number]), files[part][number], "the content") for number in sorted(every)}
            for part in range(len(files))
        ]
        tied = {
            (match[1], shape) for state in states for name, shape in _shapes(state) if (match := TIED.fullmatch(name))
        }
        for rank, state in enumerate(states):
            _check_there(state, held, rank, where)
        frozen = {
            number
            for number in every - known
            if not any(
                isinstance(one, StoredTensor) and (key, one.shape) in tied for key, one in held[0][number].items()
            )
        }
        return Layers(held, frozenset(frozen))

    def module_of(self, part: int, with_frozen: bool) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """What finds a rank's parameters and buffers, by the names of the whole model, from its state.

        Args:
            part: the tensor-parallel rank.
            with_frozen: add the layers that no rank has names of.
        """
        layers = self.held[part] if self.held else {}
        return lambda state: self._module(state, layers, self.frozen if with_frozen else frozenset())

    def copies_of(self, part: int, state: Mapping[str, Any]) -> dict[str, tuple[StoredTensor, ...]]:
        """The tensors of all layers that may be those of a rank's tied parameters, by the names of these."""
        layers = self.held[part] if self.held else {}
        return {
            name: tuple(_like_tied(layers, match[1], shape))
            for name, shape in _shapes(state)
            if (match := TIED.fullmatch(name))
        }

    @staticmethod
    def _module(
        state: Mapping[str, Any], layers: Mapping[int, Mapping[Any, Any]], more: frozenset[int]
    ) -> dict[str, Any]:
        numbers = sorted(_numbers(state) | more)
        found = {f"{number}.{key}": value for number in numbers for key, value in layers.get(number, {}).items()}
        shapes = dict(_shapes(state))
        for name in names_of(state):
            match = TIED.fullmatch(name)
            value = next(iter(_like_tied(layers, match[1], shapes.get(name))), None) if match else None
            if value is not None:
                found[name] = value
        return found


def _check_there(
    state: Mapping[str, Any], held: Sequence[Mapping[int, Mapping[Any, Any]]], rank: int, where: Path
) -> None:
    """Raise CheckpointError if no file of a layer has a parameter that is trained on a model-parallel rank.

    Which tensor-parallel rank that is, is not known yet, so it may be in the files of any.
    """
    for name, shape in _shapes(state):
        number, _, key = name.partition(".")
        match = TIED.fullmatch(name)
        found = [next(_like_tied(layers, match[1], shape), None) for layers in held] if match else []
        if match is None and number.isdigit():
            found = [layers.get(int(number), {}).get(key) for layers in held]
        if held and not any(isinstance(one, StoredTensor) and one.shape == shape for one in found):
            file = "layer_*" if match else f"layer_{int(number):02d}*" if number.isdigit() else "layer_*"
            raise CheckpointError(
                f"{where / file}_states.pt have no {name!r} of shape {list(shape)}, which model-parallel rank {rank} "
                "trains: files of several layers or saves were mixed, so copy the checkpoint again"
            )


def _like_tied(
    layers: Mapping[int, Mapping[Any, Any]], key: str, shape: tuple[int, ...] | None
) -> Iterator[StoredTensor]:
    """The tensors of layers under `key`, of `shape` if it is known."""
    for layer in layers.values():
        value = layer.get(key)
        if isinstance(value, StoredTensor) and value.shape == (shape or value.shape):
            yield value


def _shapes(state: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a rank's trained parameters."""
    return [(name, tuple(shape)) for group in state.get("param_shapes") or () for name, shape in group.items()]


def _like(there: Mapping[int, Path], number: int, part: int) -> str:
    """The name of a layer's file, in the way of those of the same rank that are there."""
    match = LAYER.fullmatch(next(iter(there.values())).name)
    return f"layer_{number:02d}-" + (f"model_{part:02d}-" if match and match[2] else "") + "model_states.pt"

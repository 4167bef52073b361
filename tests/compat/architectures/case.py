"""One architecture of transformers: its class, the settings of a tiny config, and the inputs of a step.

Config and inputs are data, so that a row of the tables reads as what differs from its neighbours; nothing comes from
the hub. Taking the model tests of transformers was rejected: they are no part of the installed package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Draw = Callable[[torch.Generator], torch.Tensor]
BATCH, LENGTH, VOCABULARY, SIDE = 2, 8, 64, 32


@dataclass(frozen=True)
class Architecture:
    """A model that is trained by sums of its outputs' squares, or by its own loss where it has labels.

    Attributes:
        model: a class of transformers.
        settings: of its config; nested configs as dicts.
        inputs: of one step, drawn anew for each rank and step; what is no function is passed as it is.
    """

    model: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0) -> torch.nn.Module:
        import transformers

        torch.manual_seed(seed)
        kind: Any = getattr(transformers, self.model)
        return kind(kind.config_class(**dict(self.settings))).train()

    def draw(self, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {name: _drawn(value, generator) for name, value in self.inputs.items()}

    def loss(self, output: Any) -> torch.Tensor:
        """The model's own loss, or the sum of the mean squares of all that it returns."""
        own = output.get("loss")
        if own is not None:
            return own.mean()
        found = [value.float().square().mean() for value in _tensors(output.to_tuple()) if value.requires_grad]
        return torch.stack(found).sum()


def ints(*shape: int, below: int = VOCABULARY, start: int = 3) -> Draw:
    return lambda generator: torch.randint(start, below, shape, generator=generator)


def floats(*shape: int) -> Draw:
    return lambda generator: torch.randn(shape, generator=generator)


def ones(*shape: int) -> Draw:
    return lambda generator: torch.ones(shape, dtype=torch.long)


def tokens(length: int = LENGTH) -> dict[str, Any]:
    """Token numbers and as many labels."""
    return {"input_ids": ints(BATCH, length), "labels": ints(BATCH, length)}


def pixels(side: int = SIDE, labels: bool = True) -> dict[str, Any]:
    """Images, and a class for each."""
    drawn: dict[str, Any] = {"pixel_values": floats(BATCH, 3, side, side)}
    return {**drawn, "labels": ints(BATCH, below=2, start=0)} if labels else drawn


def _drawn(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, list):
        return [_drawn(entry, generator) for entry in value]
    if isinstance(value, dict):
        return {name: _drawn(entry, generator) for name, entry in value.items()}
    return value(generator) if callable(value) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, tuple | list):
        return [tensor for entry in value for tensor in _tensors(entry)]
    if isinstance(value, dict):
        return [tensor for entry in value.values() for tensor in _tensors(entry)]
    return []

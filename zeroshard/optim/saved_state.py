"""Optimizer state by parameter, for checkpoints.

A rank's state of a parameter is a flat range of each of its state tensors, and scalars that are equal on all ranks,
such as the number of its updates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zeroshard.optim.regions import Region
from zeroshard.tiers import Row, RowPart, clear

Scalar = torch.Tensor | bool | int | float
"""One value for a whole parameter: a 0-dim tensor or a Python number, as the optimizer keeps it."""
STEP = "step"
"""Name of the scalar that counts a parameter's updates, in float32, as in torch's optimizers."""


@dataclass(frozen=True)
class StoredValues:
    """The values of a saved flat tensor with one value for each `per` elements of the parameter."""

    values: RowPart
    per: int


@dataclass(frozen=True)
class PackedState:
    """A state tensor that is kept in another form than one float32 value per element.

    Attributes:
        read: returns its elements as a new float32 tensor (n,).
        write: overwrites all its elements with values (n,).
        stored: the tensors in which it is kept; each is saved under the state's name, an underscore and its name here.
    """

    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]
    stored: Mapping[str, StoredValues]


@dataclass(frozen=True)
class StatePart:
    """The state of one parameter's elements in one region.

    Attributes:
        region, index: number of the region, and of the parameter in the region's layout.
        low, high: the elements [low, high), counted from the begin of the region.
        elements: `high - low` elements of each state tensor.
        scalars: 0-dim tensors on the CPU, and Python numbers.
        packed: state tensors that are kept in another form.
    """

    region: int
    index: int
    low: int
    high: int
    elements: Mapping[str, RowPart]
    scalars: Mapping[str, Scalar]
    packed: Mapping[str, PackedState] = field(default_factory=dict)


class SavedState(Protocol):
    """An optimizer's state on this rank. Region numbers are those of all trainable groups in plan order."""

    def state_keys(self, region: int) -> tuple[str, ...] | None:
        """Names of the tensors saved for each parameter of a region; None if only the state itself shows them."""
        ...

    def value_keys(self, region: int) -> tuple[str, ...] | None:
        """Names of the state tensors; they differ from `state_keys` if the state is kept in another form."""
        return self.state_keys(region)

    def elements_per_value(self, region: int, key: str) -> int:
        """For how many elements of a parameter the saved tensor `key` has one value; 1: it has as many elements."""
        return 1

    def state_parts(self) -> Iterator[StatePart]:
        """The state of all parameters that have some."""
        ...

    def updates_of(self, region: int, index: int) -> float | None:
        """How often a parameter was updated; None if this rank does not count that. Waits for the device."""
        return None

    def reset_state(self) -> None:
        """Reset the state to that before the first update."""
        ...

    def open_part(
        self, region: int, index: int, dtypes: Mapping[str, torch.dtype], scalars: Mapping[str, Scalar]
    ) -> dict[str, RowPart]:
        """Set a parameter's scalars, after `reset_state`; returns the elements of its state tensors, to be written.

        Args:
            dtypes: names of the state tensors and their dtypes.
        """
        ...

    def counters(self) -> dict[str, Any]:
        """State that belongs to no single parameter, equal on all ranks, as values that JSON can hold."""
        return {}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Load `counters`, after `reset_state`."""

    def refusal(self, counters: Mapping[str, Any], *, same_ranks: bool) -> str | None:
        """Why a state with these `counters` can't be loaded, at the same number of ranks or not; None if it can."""
        return None

    def rank_tensors(self, *, saving: bool) -> dict[str, torch.Tensor]:
        """State of this rank, 1-D, that can't be used at another number of ranks. `reset_state` sets it to 0.

        Args:
            saving: leave out what follows from the rest of a checkpoint at present.
        """
        return {}

    def finish_load(self) -> None:
        """Called by all ranks after a load has written all parameters and all state."""


class FlatState(SavedState):
    """State that most updates have: for each name a flat tensor per region, with one value per element."""

    @abstractmethod
    def flat_states(self) -> Sequence[tuple[Region, Mapping[str, Row]]]:
        """Each region and its state by name, in rows of the region's size."""

    @abstractmethod
    def step_counts(self) -> Sequence[Sequence[float]] | None:
        """Updates so far, per region and segment; None if they are not counted. Waits for the device."""

    @abstractmethod
    def set_step(self, region: int, index: int, count: float) -> None:
        """Set the updates so far of one segment."""

    def state_keys(self, region: int) -> tuple[str, ...] | None:
        """See SavedState."""
        return tuple(self.flat_states()[region][1])

    def updates_of(self, region: int, index: int) -> float | None:
        """See SavedState."""
        counts = self.step_counts()
        return None if counts is None else float(counts[region][index])

    def state_parts(self) -> Iterator[StatePart]:
        """See SavedState."""
        counts = self.step_counts()
        for number, (region, state) in enumerate(self.flat_states()):
            for index, low, high in region.pieces:
                if region.groups[index] >= 0:
                    elements = {name: RowPart(row, low, high) for name, row in state.items()}
                    scalars: dict[str, Scalar] = {}
                    if counts is not None:
                        scalars[STEP] = torch.tensor(float(counts[number][index]), dtype=torch.float32)
                    yield StatePart(number, index, low, high, elements, scalars)

    def reset_state(self) -> None:
        """See SavedState."""
        for number, (region, state) in enumerate(self.flat_states()):
            for row in state.values():
                clear(row)
            for index in range(len(region.layout.segments)):
                self.set_step(number, index, 0)

    def open_part(
        self, region: int, index: int, dtypes: Mapping[str, torch.dtype], scalars: Mapping[str, Scalar]
    ) -> dict[str, RowPart]:
        """See SavedState."""
        self.set_step(region, index, float(scalars[STEP]) if STEP in scalars else 0.0)
        owner, state = self.flat_states()[region]
        cut = piece_of(owner, index)
        return {name: RowPart(state[name], cut.start, cut.stop) for name in dtypes}


def piece_of(region: Region, index: int) -> slice:
    """The elements of a parameter in a region; an empty slice if it has none there."""
    for number, low, high in region.pieces:
        if number == index:
            return slice(low, high)
    return slice(0, 0)

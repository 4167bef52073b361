"""A unit on a rank, with its two states: where its parameters' values are, and which gradients it has.

    values      RESTING --gather--> GATHERING --landed--> GATHERED --use--> IN_USE --gradients awaited--> PENDING
                   ^                    |                  |    ^              |                             |
                   |                    |                  |    +---release----+------------collected--------+
                   +---- another unit in its slot, or a write to the shards

    gradients   NONE --> LOCAL (whole, this rank's) or REDUCED (this rank's part of the sum), or both --> NONE

Only `become` changes the first state, and it checks that the change is allowed. A unit that rests whole always shows
its values; its state says whether they are current. Rejected: separate flags ("in use", "gathering", "awaited"), some
of whose combinations have no meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from zeroshard.engine.memory.group import Group
from zeroshard.plan.groups import UnitPlan


class UnitState(Enum):
    """Where the whole values of a unit's parameters are."""

    RESTING = "resting"
    """Nowhere, or out of date."""
    GATHERING = "gathering"
    """Being gathered into the slot; compute has not waited for the gather yet."""
    IN_USE = "in use"
    """In the slot, where the parameters show them."""
    PENDING = "pending"
    """As in use, until the unit's gradients have come and are collected."""
    GATHERED = "gathered"
    """In the slot, before their use or after it, until another unit or a write comes; no parameter shows them."""


CHANGES: Mapping[UnitState, frozenset[UnitState]] = {
    UnitState.RESTING: frozenset({UnitState.GATHERING}),
    UnitState.GATHERING: frozenset({UnitState.GATHERED, UnitState.RESTING}),
    # A unit in use goes to rest when another unit needs its slot; a unit that rests whole does so when a step writes.
    UnitState.IN_USE: frozenset({UnitState.PENDING, UnitState.GATHERED, UnitState.RESTING}),
    # The root stays in use after its gradients were collected. If the order of a graph is not known, all units wait for
    # its end, and other units need their slots before that.
    UnitState.PENDING: frozenset({UnitState.GATHERED, UnitState.IN_USE, UnitState.RESTING}),
    UnitState.GATHERED: frozenset({UnitState.IN_USE, UnitState.RESTING}),
}
"""What may follow each state, besides itself."""


class GradientState(Enum):
    """Which gradients of a unit are in the engine's buffers, between a backward and the step."""

    NONE = "none"
    LOCAL = "local"
    """This rank's whole gradients, pending reduction."""
    REDUCED = "reduced"
    """This rank's part of the sum over ranks."""
    BOTH = "both"
    """Local gradients of the last backwards, beside the reduced sum of earlier ones."""

    @property
    def local(self) -> bool:
        """Whether whole local gradients wait for a reduce."""
        return self is GradientState.LOCAL or self is GradientState.BOTH

    @property
    def reduced(self) -> bool:
        """Whether reduced gradients rest."""
        return self is GradientState.REDUCED or self is GradientState.BOTH


@dataclass
class Unit:
    """A unit's groups and its state.

    Attributes:
        rests_whole: the plan gives the unit no slot: its parameters are views of its own buffer, and always shown.
        gathered_beside: its parameters are in extra memory beside the slot, for reads outside of its own forward.
    """

    plan: UnitPlan
    index: int
    groups: list[Group]
    trainable: list[Group] = field(default_factory=list)
    rests_whole: bool = False
    gathered_beside: bool = False
    state: UnitState = UnitState.RESTING
    gradients: GradientState = GradientState.NONE

    @property
    def label(self) -> str:
        return self.plan.label

    @property
    def in_use(self) -> bool:
        """Whether the parameters show their values."""
        return self.rests_whole or self.state is UnitState.IN_USE or self.state is UnitState.PENDING

    def become(self, state: UnitState) -> None:
        """Change the state."""
        assert state is self.state or state in CHANGES[self.state], f"{self.label}: {self.state} to {state}"
        self.state = state

    def show(self) -> None:
        """Give the parameters their values."""
        for group in self.groups:
            group.show()

    def hide(self) -> None:
        """Let the parameters rest."""
        for group in self.groups:
            group.hide()

    def free_beside(self) -> None:
        """Drop the extra memory: the parameters are views of the unit's slot again, or rest."""
        self.gathered_beside = False
        for group in self.groups:
            group.free_beside()
        self.show() if self.in_use else self.hide()

"""The engine's state between two steps, as a comparable value: a graph of a step is replayed only from an equal state.
The engine's state between two steps, as a comparable value: a graph of a step is replayed only from an equal state."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class StateAtRest:
    """Which memory the engine uses, and which units are gathered, in use or awaited."""

    memory: Hashable
    gathered: Hashable

"""The engine between two steps, as a value to compare: a step is replayed as a graph only from an equal one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class StateAtRest:
    """Where the engine's memory is, and what is gathered, on its way or waited for."""

    memory: Hashable
    gathered: Hashable

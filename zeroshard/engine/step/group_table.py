"""The hyper-parameters of a step as text, a line per optimizer group, for the log that ranks compare.

    group 0 (12 parameters 8d2f61c3): lr=0.001 weight_decay=0.1

A rank with another learning rate would train its part of the model differently, without an error. The text goes into
the operation log, so that the digest which the step exchanges anyway compares it; if it differs the error shows it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.engine.core.handle import Handle

_MEMBERS = ("params", "param_names")


class GroupTable:
    """Writes the table of one model's optimizer groups."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._members: list[str] = []

    def text(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """The table. Which parameters are in which group is looked at once; they can't change afterwards."""
        if len(self._members) != len(groups):
            places = self._handle.place_of
            self._members = [_members(group, places) for group in groups]
        return "\n".join(
            f"group {number} ({members}): {_values(group)}"
            for number, (members, group) in enumerate(zip(self._members, groups, strict=True))
        )


def _members(group: Mapping[str, Any], places: Mapping[int, Any]) -> str:
    names: list[str] = []
    for parameter in group["params"]:
        _, flat, index = places[id(parameter)]
        names.append(flat.plan.layout.segments[index].name)
    return f"{len(names)} parameters {zlib.crc32(' '.join(names).encode()):08x}"


def _values(group: Mapping[str, Any]) -> str:
    """The options as text; tensors on a device are left out, since reading them would wait for it."""
    found: list[str] = []
    for key in sorted(group):
        value = group[key]
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
            value = value.item()
        if key not in _MEMBERS and isinstance(value, (bool, int, float, str, tuple, list, type(None))):
            found.append(f"{key}={value!r}")
    return " ".join(found)

"""Checks before each step that a group's hyper-parameters have the same form as when the model was sharded.

Schedulers and scripts write to the groups between steps. A number may become another number, and a tuple of numbers
another of the same length; a missing value, or one of another form, would fail in the middle of an update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from zeroshard.errors import UsageError


@dataclass(frozen=True)
class _Numbers:
    """The form of an option: the length of a tuple, or None for a single number; and whether all are finite."""

    count: int | None
    finite: bool


class GroupOptions:
    """The options of one group that are numbers."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        found = {key: _numbers(value) for key, value in group.items() if key not in ("params", "param_names")}
        self._known = {key: kind for key, kind in found.items() if kind is not None}

    def check(self, number: int, group: Mapping[str, Any]) -> None:
        """Raises UsageError that names group and option. Values on a GPU are not read: the host would wait for it."""
        for key, known in self._known.items():
            if key not in group:
                raise UsageError(f"optimizer group {number} has no {key!r} any more: nothing was updated; put it back")
            value = group[key]
            now = _numbers(value)
            if now is None or now.count != known.count:
                needed = "a number" if known.count is None else f"{known.count} numbers"
                raise UsageError(f"optimizer group {number} has {key} {value!r}, not {needed}: nothing was updated")
            if known.finite and not now.finite:
                raise UsageError(
                    f"optimizer group {number} has {key} {value}: nothing was updated; look at the scheduler"
                )


def _numbers(value: Any) -> _Numbers | None:
    """None for what is neither a number nor a tuple of numbers."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        ones = [_numbers(item) for item in value]
        if any(one is None or one.count is not None for one in ones):
            return None
        return _Numbers(len(ones), all(one is not None and one.finite for one in ones))
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        return _Numbers(None, value.device.type != "cpu" or math.isfinite(value.item()))
    if isinstance(value, Real) and not isinstance(value, bool):
        return _Numbers(None, math.isfinite(value))
    return None

"""How much of a broad matrix runs: a sample by default, all of it where ZEROSHARD_ALL_CASES is set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

ALL_CASES = "ZEROSHARD_ALL_CASES" in os.environ
only_with_all_cases = pytest.mark.skipif(not ALL_CASES, reason="set ZEROSHARD_ALL_CASES=1 for every case")


def sample(cases: Sequence[T], every: int = 2) -> Sequence[T]:
    """One of `every` so many cases, or all."""
    return cases if ALL_CASES else cases[::every]

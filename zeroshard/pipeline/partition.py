"""Which layers each part of a pipeline has: consecutive ones, balanced by number, by parameters or by kind.

    uniform              parts of equally many layers
    parameters           the heaviest part has as few trained parameters as can be
    type:REGEX           parts of equally many layers whose class name matches; the others go with their neighbours

A part is never empty. Rejected: a search over measured times, which would be another partition on each machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zeroshard.errors import UsageError

METHODS = ("uniform", "parameters", "type:REGEX")


def weights_of(method: str, names: Sequence[str], parameters: Sequence[int]) -> list[int]:
    """What each layer weighs.

    Args:
        names: of the layers' classes or functions.
        parameters: trained parameters of each layer.

    Raises:
        UsageError: there is no such method, or no layer matches.
    """
    wanted = method.lower()
    if wanted == "uniform":
        return [1] * len(names)
    if wanted == "parameters":
        return list(parameters)
    if not wanted.startswith("type:"):
        raise UsageError(f"partition_method {method!r}: there are {', '.join(METHODS)}")
    pattern = re.compile(method[len("type:") :], re.IGNORECASE)
    weights = [1 if pattern.search(name) else 0 for name in names]
    if not any(weights):
        raise UsageError(
            f"partition_method {method!r}: no layer's class matches; the layers are {', '.join(dict.fromkeys(names))}"
        )
    return weights


def partition(weights: Sequence[int], parts: int) -> list[int]:
    """The borders of `parts` parts: part p has the layers [borders[p], borders[p + 1]).

    The heaviest part is as light as can be, and among such partitions squares of the parts' weights are least.

    Raises:
        UsageError: there are fewer layers than parts.
    """
    count = len(weights)
    if parts < 1 or count < parts:
        raise UsageError(
            f"a pipeline of {count} layers can't have {parts} parts: each needs at least one layer; use fewer stages"
        )
    before = [0]
    for weight in weights:
        before.append(before[-1] + weight)
    limit = _least_limit(before, parts)
    return _even(before, parts, limit)


def _least_limit(before: Sequence[int], parts: int) -> int:
    """The least weight that no part has to exceed, each part having a layer."""
    low, high = 0, before[-1]
    while low < high:
        middle = (low + high) // 2
        if _parts_within(before, middle, parts):
            high = middle
        else:
            low = middle + 1
    return low


def _parts_within(before: Sequence[int], limit: int, parts: int) -> bool:
    """Whether at most `parts` parts of at most `limit` hold all layers; more parts are had by cutting one further."""
    used, start = 0, 0
    for end in range(1, len(before)):
        if before[end] - before[end - 1] > limit:
            return False
        if before[end] - before[start] > limit:
            used, start = used + 1, end - 1
    return used + 1 <= parts


def _even(before: Sequence[int], parts: int, limit: int) -> list[int]:
    """The partition within `limit` with the least squares, by dynamic programming over (part, end)."""
    count = len(before) - 1
    best: list[tuple[int, int] | None] = [None] * (count + 1)
    best[0] = (0, 0)
    choices: list[list[int]] = []
    for part in range(1, parts + 1):
        found: list[tuple[int, int] | None] = [None] * (count + 1)
        chosen = [0] * (count + 1)
        for end in range(part, count - (parts - part) + 1):
            for start in range(end - 1, part - 2, -1):
                weight = before[end] - before[start]
                if weight > limit:
                    break
                earlier = best[start]
                if earlier is None:
                    continue
                cost = (earlier[0] + weight * weight, earlier[1] + (end - start) ** 2)
                known = found[end]
                if known is None or cost < known:
                    found[end], chosen[end] = cost, start
        best = found
        choices.append(chosen)
    borders = [count]
    for chosen in reversed(choices):
        borders.append(chosen[borders[-1]])
    return borders[::-1]

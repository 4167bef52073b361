"""The batch triple: train = micro x accumulation x world size, from any one or two of the three.

One rule for each combination that is given, and for a contradiction the numbers and where each comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.config.problems import Problems
from zeroshard.config.resolved import BatchConfig

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
NAMES = (TRAIN, MICRO, ACCUMULATION)


@dataclass(frozen=True)
class Given:
    """A number that was given, and where."""

    value: int
    origin: str


def resolve_batch(
    given: dict[str, Given], world_size: int, problems: Problems, same_batch: int = 1
) -> tuple[BatchConfig, dict[str, str]]:
    """The triple and the origin of each number that was not given as it is; problems if it can't be had.

    Args:
        same_batch: ranks that read the same batch. transformers and accelerate count all of them in what they fill in.
    """
    if TRAIN not in given and MICRO not in given:
        have = f"only {ACCUMULATION} is given" if ACCUMULATION in given else "no batch size is given"
        what = (
            f"{have}; give {MICRO} (samples per forward pass on one rank) or {TRAIN} (samples per step over all ranks)"
        )
        problems.add(MICRO, given[ACCUMULATION].origin if ACCUMULATION in given else "", what)
        return BatchConfig(1, 1, 1), {}
    numbers = {name: entry.value for name, entry in given.items()}
    origins: dict[str, str] = {}
    if MICRO not in numbers:
        steps = numbers.setdefault(ACCUMULATION, 1)
        numbers[MICRO] = _divide(given, numbers, (ACCUMULATION,), steps, world_size, problems)
        origins[MICRO] = f"derived: {numbers[TRAIN]} / ({steps} accumulation x {world_size} ranks)"
    elif ACCUMULATION not in numbers and TRAIN in numbers:
        numbers[ACCUMULATION] = _divide(given, numbers, (MICRO,), numbers[MICRO], world_size, problems)
        origins[ACCUMULATION] = f"derived: {numbers[TRAIN]} / ({numbers[MICRO]} micro-batch x {world_size} ranks)"
    if ACCUMULATION not in given and ACCUMULATION not in origins:
        numbers.setdefault(ACCUMULATION, 1)
        origins[ACCUMULATION] = "default"
    product = numbers[MICRO] * numbers[ACCUMULATION] * world_size
    if TRAIN not in numbers:
        numbers[TRAIN] = product
        origins[TRAIN] = f"derived: {numbers[MICRO]} x {numbers[ACCUMULATION]} accumulation x {world_size} ranks"
    elif len(given) == len(NAMES) and numbers[TRAIN] == product * same_batch != product:
        numbers[TRAIN] = product
        origins[TRAIN] = f"{given[TRAIN].value} ({given[TRAIN].origin}) counts ranks that read the same batch"
    elif len(given) == len(NAMES) and numbers[TRAIN] != product:
        _contradiction(given, product, world_size, problems)
    return BatchConfig(numbers[TRAIN], numbers[MICRO], numbers[ACCUMULATION]), origins


def _divide(
    given: dict[str, Given],
    numbers: dict[str, int],
    others: tuple[str, ...],
    factor: int,
    world_size: int,
    problems: Problems,
) -> int:
    quotient, rest = divmod(numbers[TRAIN], factor * world_size)
    if rest == 0:
        return quotient
    named = [f"{name} {given[name].value} ({given[name].origin})" for name in others if name in given]
    divisor = " x ".join([*named, f"{world_size} ranks"])
    down, up = numbers[TRAIN] - rest, numbers[TRAIN] - rest + factor * world_size
    fitting = f"{down} or {up}" if down else f"{up}"
    what = (
        f"{numbers[TRAIN]} doesn't divide by {divisor} = {factor * world_size}; {fitting} would, or change the others"
    )
    problems.add(TRAIN, given[TRAIN].origin, what)
    return max(1, quotient)


def _contradiction(given: dict[str, Given], product: int, world_size: int, problems: Problems) -> None:
    micro, steps = given[MICRO], given[ACCUMULATION]
    what = (
        f"says {given[TRAIN].value}, but {MICRO} {micro.value} ({micro.origin}) x {ACCUMULATION} {steps.value} "
        f"({steps.origin}) x {world_size} ranks = {product}; correct one of them, or leave one out"
    )
    problems.add(TRAIN, given[TRAIN].origin, what)

"""Lists of cores as text."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {})


def parse_range_list(range_str: str) -> list[int]:
    """The numbers of a list such as "0,2-4,6": rising, each once.

    Raises:
        ValueError: numbers that do not rise, or text that is no such list.
    """
    found: list[int] = []
    for part in range_str.split(","):
        low, _, high = part.partition("-")
        numbers = range(int(low), int(high or low) + 1)
        if not numbers or (found and numbers[0] <= found[-1]):
            raise ValueError(f"{range_str!r}: the numbers must rise, and those of {part!r} do not")
        found += numbers
    return found

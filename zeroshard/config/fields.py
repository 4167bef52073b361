"""The value types of the models: numbers, switches and dtypes that say in words what they want.

JSON has one number type, so `5e8` is a whole number and `1` is a number; `"true"` is neither true nor a number. For a
switch 0 and 1 are false and true; they are taken for them before anything else looks at them.
pydantic's own coercions are rejected because they take strings for numbers and numbers for switches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from zeroshard.config.problems import show

LARGEST = 2**63 - 1
LARGEST_REAL = 3e38
"""What float32 can hold, rounded down: torch refuses to compute with more, long after the config was read."""

Dtype = Literal["fp32", "bf16", "fp16"]

_DTYPES: dict[str, Dtype] = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
}


def refuse(wanted: str, value: Any) -> PydanticCustomError:
    """The error of a value that is not what the field wants."""
    return PydanticCustomError("zeroshard", "must be {wanted}, not {shown}", {"wanted": wanted, "shown": show(value)})


def _bounds(low: float, high: float | None) -> str:
    return f" of at least {low}" if high is None else f" from {low} to {high}"


def whole_number(low: int, high: int = LARGEST) -> Callable[[Any], int]:
    """A check for a whole number in [low, high]; `5e8` counts as whole."""
    wanted = "a whole number" + _bounds(low, None if high == LARGEST else high)

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(wanted, value)
        if not math.isfinite(value) or value != int(value) or not low <= value <= high:
            raise refuse(wanted, value)
        return int(value)

    return check


def whole(low: int, high: int = LARGEST) -> BeforeValidator:
    """A whole number in [low, high]; see `whole_number`."""
    return BeforeValidator(whole_number(low, high))


def real_number(
    low: float | None = None, *, above: float | None = None, below: float | None = None, high: float | None = None
) -> Callable[[Any], float]:
    """A check for a finite number: from `low` to `high`, greater than `above`, less than `below`, as far as given."""
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("of at least", low), ("above", above), ("below", below), ("at most", high))
        if bound is not None
    ]
    wanted = " ".join(["a number", " and ".join(bounds)]).strip()

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(wanted, value)
        number = float(value)
        inside = (
            (low is None or number >= low)
            and (above is None or number > above)
            and (below is None or number < below)
            and (high is None or number <= high)
        )
        if not math.isfinite(number) or not inside:
            raise refuse(wanted, value)
        if abs(number) > LARGEST_REAL:
            raise refuse(f"{wanted} that float32 can hold", value)
        return number

    return check


def real(low: float | None = None, *, above: float | None = None, below: float | None = None) -> BeforeValidator:
    """A finite number within the bounds given; see `real_number`."""
    return BeforeValidator(real_number(low, above=above, below=below))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise refuse("true or false", value)
    return value


def _dtype(value: Any) -> Dtype:
    name = value.removeprefix("torch.").lower() if isinstance(value, str) else None
    if name not in _DTYPES:
        raise refuse('"fp32", "bf16" or "fp16"', value)
    return _DTYPES[name]


def _half(value: Any) -> Dtype:
    name = _dtype(value)
    if name == "fp32":
        raise refuse('"bf16" or "fp16"', value)
    return name


def exactly(expected: bool, reason: str) -> BeforeValidator:
    """A switch that has one position; `reason` says why."""

    def check(value: Any) -> bool:
        if value is not expected:
            raise refuse(f"{show(expected)} ({reason})", value)
        return expected

    return BeforeValidator(check)


def one_of(*choices: str) -> BeforeValidator:
    """One of some names, whatever their case."""
    by_lower = {choice.lower(): choice for choice in choices}
    wanted = " or ".join(show(choice) for choice in choices)

    def check(value: Any) -> str:
        found = by_lower.get(value.lower()) if isinstance(value, str) else None
        if found is None:
            raise refuse(wanted, value)
        return found

    return BeforeValidator(check)


def _names_or_auto(value: Any) -> Any:
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refuse('"auto" or a list of strings', value)
    return tuple(value)


def _stage(value: Any) -> Any:
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in range(4):  # 3.0 is in it too
        raise refuse('"auto" or a whole number from 0 to 3', value)
    return int(value)


def _names(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refuse("a string or a list of strings", value)
    return tuple(value)


def _text_list(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise refuse("a list of strings", value)
    return tuple(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise refuse("a string that is not empty", value)
    return value


def _any_text(value: Any) -> str:
    if not isinstance(value, str):
        raise refuse("a string", value)
    return value


def _counts(value: Any) -> Any:
    wanted = "a list of whole numbers of at least 1"
    if not isinstance(value, list | tuple) or not value:
        raise refuse(wanted, value)
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 1 for item in value):
        raise refuse(wanted, value)
    return tuple(value)


def _count_or_auto(value: Any) -> Any:
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refuse('"auto" or a whole number of at least 1', value)
    return value


def _elastic_version(value: Any) -> float:
    if isinstance(value, bool) or value not in (0.1, 0.2):
        raise refuse("0.1 or 0.2", value)
    return float(value)


def _print_interval(value: Any) -> Any:
    if value == math.inf and not isinstance(value, bool):
        return None
    return whole_number(1, LARGEST)(value)


LogLevel = Annotated[
    Literal["debug", "info", "warning", "error", "critical"],
    one_of("debug", "info", "warning", "error", "critical"),
]
CountOrAuto = Annotated["Literal['auto'] | int", BeforeValidator(_count_or_auto)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Text = Annotated[str, BeforeValidator(_text)]
AnyText = Annotated[str, BeforeValidator(_any_text)]
Size = Annotated[int, whole(0)]
Count = Annotated[int, whole(1)]
Counts = Annotated["tuple[int, ...]", BeforeValidator(_counts)]
ElasticVersion = Annotated[float, BeforeValidator(_elastic_version)]
NonNegative = Annotated[float, real(0)]
Share = Annotated[float, BeforeValidator(real_number(0, high=1))]
Positive = Annotated[float, real(above=0)]
DtypeName = Annotated[Dtype, BeforeValidator(_dtype)]
HalfName = Annotated[Dtype, BeforeValidator(_half)]
Stage = Annotated["Literal['auto'] | int", BeforeValidator(_stage)]
NamesOrAuto = Annotated["Literal['auto'] | tuple[str, ...]", BeforeValidator(_names_or_auto)]
Names = Annotated["tuple[str, ...]", BeforeValidator(_names)]
TextList = Annotated["tuple[str, ...]", BeforeValidator(_text_list)]
PrintInterval = Annotated["int | None", BeforeValidator(_print_interval)]

"""Refuse arguments of a wrong kind where they come in, by the name of the call, before they fail somewhere inside."""

from __future__ import annotations

from collections.abc import Callable

from zeroshard.errors import UsageError


def need_kind(value: object, kind: type | tuple[type, ...], call: str, needed: str) -> None:
    """Raises UsageError unless the value is of a kind.

    Args:
        call: whose argument it is.
        needed: the kind in words, with its article: "an nn.Module".
    """
    if not isinstance(value, kind):
        raise UsageError(f"{call}: {needed} is needed, got {_shown(value)}")


def need_function(value: object, call: str, needed: str) -> Callable[..., object]:
    """The value. Raises UsageError where it can't be called."""
    if not callable(value):
        raise UsageError(f"{call}: {needed} is needed, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """A short value as it is, others by their type."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return repr(value) if isinstance(value, str) and len(value) < 60 else f"a {type(value).__name__}"

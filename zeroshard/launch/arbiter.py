"""Which of several nodes' troubles came first: one judge hears all of them, and tells one cause.

    node 1: died (rank 3) ----------- cause: text ----> told
    node 0: ......... died (rank 0) ------------------> a consequence, told after it
    node 2: ..... gone -------------------------------> within the settling time it goes before the deaths

The order is that of arrival at the judge: clocks of different hosts are not comparable. A node that is lost takes its
ranks along and makes others fail in the same instant, so it goes before deaths that are told at the same time; a rank
that was killed outright goes before those that failed with an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_SETTLE_SECONDS = 1.0
# How long the node of the first death may take to say why; it has to end its other ranks before it knows all.
_CAUSE_SECONDS = 15.0


@dataclass
class Arbiter:
    """Fed with events and the time in seconds; `decided` is the node that is to blame, `verdict` the text to tell."""

    _first_at: float | None = None
    _first: int | None = None
    _violent: bool = False
    _gone: tuple[int, str] | None = None
    _causes: dict[int, str] = field(default_factory=dict)

    def died(self, node: int, now: float, violent: bool = False) -> None:
        """A rank of the node failed; `violent` if it was killed outright, which makes others fail at once."""
        if self._first is None or self._first_at is None:
            self._first, self._first_at, self._violent = node, now, violent
        elif violent and not self._violent and now - self._first_at <= _SETTLE_SECONDS:
            self._first, self._violent = node, True

    def gone(self, node: int, text: str, now: float) -> None:
        """The node itself is lost; `text` says how."""
        if self._gone is None and (self._first_at is None or now - self._first_at <= _SETTLE_SECONDS):
            self._gone = (node, text)
        if self._first is None:
            self._first, self._first_at = node, now

    def cause(self, node: int, text: str) -> None:
        """Why a rank of the node failed; a later one replaces it."""
        self._causes[node] = text

    @property
    def troubled(self) -> bool:
        """Whether anything has failed."""
        return self._first is not None

    @property
    def decided(self) -> int | None:
        """The node where it began."""
        return self._gone[0] if self._gone is not None else self._first

    def verdict(self, now: float, final: bool) -> str | None:
        """What to tell, or None while it is too early; `final` when nothing more will come."""
        if self._first_at is None:
            return None
        waited = now - self._first_at
        if waited < _SETTLE_SECONDS and not final:
            return None
        if self._gone is not None:
            return self._gone[1]
        assert self._first is not None
        text = self._causes.get(self._first)
        if text is None and (final or waited >= _CAUSE_SECONDS):
            return "zeroshard: a rank failed first, but its node did not say why"
        return text

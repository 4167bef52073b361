"""Which of several nodes' troubles came first: one judge hears all of them, and tells one cause.

    node 0: died (rank 0) ---------------- cause: text --> a consequence, told after it
    node 1: ................ died (rank 3), killed ------- cause: text ----> told
    node 2: .................... clear

The order is that of arrival at the judge: clocks of different hosts are not comparable. But news of what follows from
a failure may overtake the news of it. So when one node is in trouble the others are told to stop, and each looks at its
own ranks before it ends any: what a failure has caused comes after the failure, so the rank to blame is dead or dying
by then. A node answers with the cause, or that it is clear. Until it has, the loss of it, or of a rank that was killed
outright, goes before what was heard already. A fixed time for the news was rejected: busy machines take longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# The same for a node that was heard: outside of Linux it can't see who is dying.
_SETTLE_SECONDS = 1.0
# How long nodes may take to say why, or that they are clear; they have to end their other ranks before they know all.
_CAUSE_SECONDS = 15.0


@dataclass
class Arbiter:
    """Fed with events and the time in seconds; `decided` is the node that is to blame, `verdict` the text to tell.

    Nodes are numbered from 0 to `nodes` - 1.
    """

    nodes: int
    _first_at: float | None = None
    _first: int | None = None
    _violent: bool = False
    _gone: tuple[int, str] | None = None
    _causes: dict[int, str] = field(default_factory=dict)
    _clear: set[int] = field(default_factory=set)

    def died(self, node: int, now: float, violent: bool = False) -> None:
        """A rank of the node failed; `violent` if it was killed outright, which makes others fail at once."""
        if self._first is None or self._first_at is None:
            self._first, self._first_at, self._violent = node, now, violent
        elif violent and not self._violent and self._may_be_first(node, now):
            self._first, self._violent = node, True

    def gone(self, node: int, text: str, now: float) -> None:
        """The node itself is lost; `text` says how."""
        if self._gone is None and self._may_be_first(node, now):
            self._gone = (node, text)
        if self._first is None:
            self._first, self._first_at = node, now

    def _may_be_first(self, node: int, now: float) -> bool:
        return self._first_at is None or node not in self._heard or now - self._first_at <= _SETTLE_SECONDS

    def clear(self, node: int) -> None:
        """No rank of the node has failed that was not told of."""
        self._clear.add(node)

    @property
    def _heard(self) -> set[int]:
        return self._clear | set(self._causes)

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
        if len(self._heard) < self.nodes and not final and waited < _CAUSE_SECONDS:
            return None
        text = self._causes.get(self._first)
        if text is None and (final or waited >= _CAUSE_SECONDS):
            return "zeroshard: a rank failed first, but its node did not say why"
        return text

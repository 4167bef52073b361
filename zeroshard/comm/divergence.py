"""Compares the operation logs of several ranks: finds their first difference, and writes the error message.

Pure functions of what the ranks published; the watchdog moves the data. Logs are compared by operation number, each
rank over the part that its tail still holds. A rank whose log simply ends earlier is behind, not divergent: the
alternative, to compare digests only, can't tell these two apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zeroshard.comm.oplog import PLAN, STEP, LogTail, Operation

ADVICE = (
    "All ranks must run the same blocks in the same order; look for a branch that depends on the rank or on its data."
)
STEP_ADVICE = (
    "Hyper-parameters must be the same on all ranks, else each trains another model; look for a rate, a schedule or a "
    "group that depends on the rank."
)
PLAN_ADVICE = (
    "All ranks must shard the same model by the same plan; look for an argument of shard() or initialize(), or a "
    "setting of the config, that depends on the rank."
)
_SHOWN_LINES = 2
"""Lines of a plan that a message shows of each rank."""


@dataclass(frozen=True)
class Divergence:
    """The first operation in which ranks differ: its number and which ranks issued what."""

    number: int
    issued: tuple[tuple[Operation, tuple[int, ...]], ...]


def name_ranks(ranks: Iterable[int]) -> str:
    """'rank 3' or 'ranks 0-2, 5'."""
    ordered = sorted(ranks)
    runs: list[tuple[int, int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"


def find_divergence(tails: Mapping[int, LogTail]) -> Divergence | None:
    """The first operation number at which two ranks that both still know it issued different operations."""
    if not tails:
        return None
    start = min(tail.first for tail in tails.values())
    stop = max(tail.count for tail in tails.values())
    for number in range(start, stop + 1):
        issued: dict[Operation, list[int]] = {}
        for rank in sorted(tails):
            tail = tails[rank]
            if tail.first <= number <= tail.count:
                issued.setdefault(tail.operations[number - tail.first], []).append(rank)
        if len(issued) > 1:
            return Divergence(number, tuple((operation, tuple(ranks)) for operation, ranks in issued.items()))
    return None


def behind(tails: Mapping[int, LogTail]) -> dict[int, Operation | None]:
    """The ranks that issued fewer operations than the furthest one, and the last operation of each."""
    furthest = max((tail.count for tail in tails.values()), default=0)
    return {
        rank: tail.operations[-1] if tail.operations else None
        for rank, tail in sorted(tails.items())
        if tail.count < furthest
    }


def explain(divergence: Divergence) -> str:
    """One sentence that names the operation, the units and the ranks, and one that says what to do."""
    kinds = {operation.kind for operation, _ in divergence.issued}
    if kinds == {STEP}:
        return f"ranks stepped with different optimizer groups: {_differing(divergence)}. {STEP_ADVICE}"
    if kinds == {PLAN}:
        return f"ranks sharded by different plans: {_differing(divergence, _SHOWN_LINES)}. {PLAN_ADVICE}"
    sizes_matter = len({(operation.kind, operation.unit) for operation, _ in divergence.issued}) == 1
    clauses = []
    for place, (operation, ranks) in enumerate(divergence.issued):
        size = f" ({operation.nbytes} bytes)" if sizes_matter else ""
        number = f" as operation {divergence.number}" if place == 0 else ""
        clauses.append(f"{name_ranks(ranks)} issued {operation}{size}{number}")
    return f"{clauses[0]} where {' and '.join(clauses[1:])}. {ADVICE}"


def _differing(divergence: Divergence, most: int | None = None) -> str:
    """The lines in which the texts of ranks differ, at most so many of each."""
    texts = [(operation.unit.splitlines(), ranks) for operation, ranks in divergence.issued]
    common = set.intersection(*(set(lines) for lines, _ in texts))
    clauses: list[str] = []
    for lines, ranks in texts:
        own = [line for line in lines if line not in common]
        shown = [*own[:most], f"{len(own) - most} more"] if most is not None and len(own) > most else own
        clauses.append(f"{name_ranks(ranks)} with {'; '.join(shown) or 'nothing of it'}")
    return ", ".join(clauses)


def explain_digests(tails: Mapping[int, LogTail]) -> str:
    """What to say when digests differ: the first differing operation, or that it is older than the logs reach."""
    divergence = find_divergence(tails)
    if divergence is not None:
        return explain(divergence)
    counts = {tail.count for tail in tails.values()}
    if len(counts) > 1:
        ranks = behind(tails)
        rank, last = next(iter(ranks.items()))
        return (
            f"{name_ranks(ranks)} issued fewer collectives than the others in the same step: rank {rank} stopped at "
            f"operation {tails[rank].count} ({last if last is not None else 'none'}) where others went on to "
            f"operation {max(counts)}. {ADVICE}"
        )
    oldest = max(tail.first for tail in tails.values())
    return f"ranks issued different collectives before operation {oldest}, as far back as the logs reach. {ADVICE}"

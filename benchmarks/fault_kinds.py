"""The kinds of faults of `python -m benchmarks faults`: what is done to a run, and what zeroshard has to call it.

    Fault     a kind, the rank that has it, and random parameters       drawn by `draw`
    Kind      how parameters are drawn, and what is expected            a cause of `explain`, or the text of an error

Everything follows from a seed, so that a run that was named wrongly can be made again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from zeroshard.observe.runs.findings import Cause

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Fault:
    """One run.

    Attributes:
        kind: a name of `KINDS`.
        ranks, rank: how many there are, and which has the fault; -1 where all have it.
        stage: of ZeRO.
        width, layers, rows, length: of the model and a micro-batch.
        steps, first: how many there are, and from which on the fault is there.
        numbers: parameters of the kind.
    """

    kind: str
    ranks: int
    rank: int
    stage: int
    width: int
    layers: int
    rows: int
    length: int
    steps: int
    first: int
    seed: int
    numbers: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Kind:
    """How a kind of fault is drawn and told.

    Attributes:
        text: what it is, for the table.
        cause: what explain calls it; None where an error does.
        error: a pattern of the error's text, in which {rank} is the rank; None where explain tells.
        draws: its parameters.
        at_all: whether all ranks have it (1), one (0), or either by chance.
        steps: of a run.
    """

    text: str
    cause: Cause | None = None
    error: str | None = None
    draws: Callable[[random.Random], Numbers] = lambda _: {}
    at_all: float = 0.0
    steps: int = 50
    width: int = 256
    needs: str | None = None
    """A command that has to be there, which the kind runs as root."""


def _milliseconds(least: float, most: float) -> Callable[[random.Random], Numbers]:
    return lambda chance: {"seconds": chance.uniform(least, most) / 1000}


def _rare(chance: random.Random) -> Numbers:
    if chance.random() < 0.5:
        return {"seconds": chance.uniform(20, 80) / 1000, "every": 1}
    return {"seconds": chance.uniform(150, 400) / 1000, "every": chance.randint(4, 8)}


KINDS: dict[str, Kind] = {
    "healthy": Kind("nothing is wrong"),
    "tokens": Kind(
        "one rank has 1.5 to 3 times the tokens",
        Cause.TOKENS,
        draws=lambda c: {"times": c.choice((1.5, 2.0, 3.0))},
        width=512,
    ),
    "loader": Kind("the data loader stalls, always or at times", Cause.DATA, draws=_rare, at_all=0.4),
    "script": Kind("the script sleeps between two steps", Cause.SCRIPT, draws=_milliseconds(20, 80)),
    "blocked": Kind("a module sleeps in its forward", Cause.BLOCKED, draws=_milliseconds(20, 80)),
    "garbage": Kind(
        "collections of garbage over a large heap",
        Cause.GARBAGE,
        draws=lambda c: {"objects": c.uniform(1e6, 1.5e6), "every": c.randint(1, 3)},
    ),
    "processor": Kind(
        "other processes on the rank's core", Cause.PROCESSOR, draws=lambda c: {"processes": c.randint(2, 3)}
    ),
    "work": Kind("the model computes 15 to 40 ms more on one rank", Cause.SLOWER, draws=_milliseconds(15, 40)),
    "disk": Kind(
        "a disk with state of the optimizer answers late",
        Cause.DISK,
        draws=_milliseconds(3, 10),
        at_all=0.5,
        steps=30,
    ),
    "link": Kind(
        "a link of 40 to 160 Mbit/s (tc)",
        Cause.LINK,
        draws=lambda c: {"mbit": c.choice((40.0, 80.0, 160.0))},
        at_all=1.0,
        steps=16,
        needs="tc",
    ),
    "saving": Kind(
        "a checkpoint of 96 MiB and more every 2 to 4 steps",
        Cause.SAVING,
        draws=lambda c: {"every": c.randint(2, 4)},
        at_all=1.0,
        steps=30,
    ),
    "leak": Kind("the script keeps 3 to 6 MiB a step", Cause.LEAK, draws=lambda c: {"mib": c.uniform(3, 6)}, steps=60),
    "nan": Kind(
        "NaN in the loss of one rank, in float16",
        Cause.NAN,
        draws=lambda c: {"count": c.choice((1, 3, 100))},
        steps=30,
    ),
    "overflow": Kind(
        "a loss that is too large for float16 at any scale",
        Cause.OVERFLOW,
        draws=lambda c: {"times": 10 ** c.uniform(12, 20)},
        at_all=1.0,
        steps=30,
    ),
    "spike": Kind(
        "a batch with a loss 30 to 300 times as large",
        Cause.SPIKE,
        draws=lambda c: {"times": c.uniform(30, 300)},
        at_all=1.0,
        steps=30,
    ),
    "resume": Kind(
        "a load that leaves out the optimizer's state, or goes on with a larger rate",
        Cause.RESUME,
        draws=lambda c: {"rate": c.choice((0.0, 30.0, 100.0))},
        at_all=1.0,
        steps=40,
    ),
    "mismatch": Kind("one rank alone collects the whole state", error=r"DivergenceError", steps=12),
    "barrier": Kind(
        "one rank waits in a barrier of the script's", error=r"rank {rank} waits for all ranks in torch", steps=12
    ),
    "lost": Kind("a rank is killed", error=r"rank {rank} (died \(process|is dead or unreachable)", steps=12),
    "left": Kind("a rank ends its loop earlier", error=r"rank {rank} left after", steps=12),
    "damaged": Kind(
        "a byte of a checkpoint has changed",
        error=r"CheckpointError: .* (is damaged|does not match)",
        at_all=1.0,
        steps=4,
    ),
}
FAULTS = tuple(name for name in KINDS if name != "healthy")


def draw(name: str, seed: int) -> Fault:
    """A run of a kind, whose parameters follow from the seed."""
    chance, kind = random.Random(seed), KINDS[name]
    ranks = 2 if name in ("processor", "link", "healthy") else chance.choice((2, 2, 3))
    return Fault(
        kind=name,
        ranks=ranks,
        rank=-1 if chance.random() < kind.at_all else chance.randrange(ranks),
        stage=3 if name in ("mismatch", "barrier") else chance.choice((1, 2, 3)),
        width=kind.width,
        layers=chance.choice((2, 3, 4)),
        rows=4,
        length=chance.choice((96, 128)),
        steps=kind.steps,
        first=chance.randint(5, 8) if kind.steps > 10 else 2,
        seed=seed,
        numbers=dict(kind.draws(chance)),
    )

"""How heads are divided over the ranks of a sequence.

    8 heads of queries, 2 of keys, 4 ranks       rank 0   queries 0 1   keys 0
                                                 rank 1   queries 2 3   keys 0, a second copy
                                                 rank 2   queries 4 5   keys 1   ...

Each rank has as many heads of queries, and the keys that they attend to. Heads of keys that the ranks don't divide are
copied as often as it takes; the gradients of copies are summed by autograd.
"""

from __future__ import annotations

import math

from zeroshard.errors import PlanError


def check_heads(heads: int, key_heads: int, ranks: int, where: str) -> None:
    """Each rank gets whole heads. Raises PlanError with the numbers."""
    if heads % ranks:
        raise PlanError(
            f"{where}: the model has {heads} heads of attention, which {ranks} ranks of a sequence do not divide; "
            f"choose a divisor of {heads}"
        )
    if heads % key_heads:
        raise PlanError(f"{where}: {heads} heads of queries are no multiple of the {key_heads} heads of keys")


def key_copies(heads: int, key_heads: int, ranks: int) -> int:
    """How often each head of keys is there before the exchange, so that every rank gets those of its queries."""
    copies = ranks // math.gcd(key_heads, ranks)
    each = heads // key_heads
    return copies if each % copies == 0 else each

"""Computes what torch's caching allocator adds to tensors, so that `memory_allocated` is more than their sizes.

    requested    | 193.008 MiB |                a tensor of 10 MiB or more gets a segment of its own,
    segment      | 193.008 MiB | 0.992 |        whole multiples of 2 MiB. What is left of it is cut off and used for
                                                others if it is more than 1 MiB, and else counts as allocated.

Smaller tensors share segments and are rounded to 512 bytes. This is used for state that rests; activations come and go,
and take pieces of all sizes. The rules are those of c10's CUDACachingAllocator (torch 2.11 to 2.14) at its default
settings. Rejected: the same rules for activations, which would need the order of all frees.
"""

from __future__ import annotations

MIB = 2**20
BLOCK = 512
"""Bytes to whose multiples all allocations are rounded."""
LARGE, SEGMENT, LEAST_CUT = 10 * MIB, 2 * MIB, MIB
"""Bytes from which a tensor has its own segment, to whose multiples it is rounded, and above which a rest is reused."""


def rounding(nbytes: int) -> int:
    """Bytes that count as allocated for a resting tensor beyond its own `nbytes`."""
    if nbytes == 0:
        return 0
    taken = round_up(nbytes, BLOCK)
    if taken >= LARGE:
        left = round_up(taken, SEGMENT) - taken
        taken += left if left <= LEAST_CUT else 0
    return taken - nbytes


def round_up(nbytes: int, multiple: int) -> int:
    """The next multiple, or `nbytes` if it is one."""
    return -(-nbytes // multiple) * multiple

"""What torch's caching allocator adds to a tensor: why `memory_allocated` is more than the sum of the sizes.

    requested    | 193.008 MiB |                a tensor of 10 MiB or more gets a segment of its own,
    segment      | 193.008 MiB | 0.992 |        whole multiples of 2 MiB. What is left of it is cut off and used for
                                                others if it is more than 1 MiB, and else counts as allocated.

Smaller tensors share segments and are rounded to 512 bytes. Only what rests is counted so; what comes and goes in a
step is taken from pieces of all sizes. The rules are those of c10's CUDACachingAllocator (torch 2.11 to 2.14) at its
default settings. Rejected: the ledger of activations under the same rules, which would need the order of all frees.
"""

from __future__ import annotations

MIB = 2**20
UNIT = 512
LARGE, SEGMENT, LEAST_CUT = 10 * MIB, 2 * MIB, MIB


def rounding(nbytes: int) -> int:
    """Bytes that count as allocated for a resting tensor of `nbytes`, beyond its own."""
    if nbytes == 0:
        return 0
    taken = _up(nbytes, UNIT)
    if taken >= LARGE:
        left = _up(taken, SEGMENT) - taken
        taken += left if left <= LEAST_CUT else 0
    return taken - nbytes


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple

"""Fingerprints of tensors: whether anybody wrote on them, without a copy of what they were.

    fingerprint = sum of bits[i] * weights[i]  (mod 2^64)     bits: the elements, read as integers
                                                              weights: random, the same for every tensor

A change goes unnoticed with a chance of about 2^-32. Version counters do not see what is written through
`parameter.data`, a NumPy array or a kernel of one's own. Rejected: a copy to compare with, which takes the memory of
the parameters once more; and plain sums, which do not see a tensor that is negated or permuted.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import _disable_current_modes

_CHUNK = 2**20
_SEED = 0x5EED
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Fingerprints:
    """Makes fingerprints on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights = torch.empty(0, dtype=torch.int64)

    def of(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """One number for each tensor."""
        # Modes that the caller has set, of selective checkpointing for instance, would take these for its operations.
        with torch.no_grad(), _disable_current_modes():
            flat = [tensor.detach().reshape(-1) for tensor in tensors]
            longest = min(_CHUNK, max((tensor.nbytes for tensor in flat), default=0))
            if len(self._weights) < longest:
                self._weights = self._draw(longest)
            found = [self._one(tensor) for tensor in flat]
            return torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=self._device)

    def give_memory_back(self) -> None:
        """The weights are drawn anew when they are needed again."""
        self._weights = torch.empty(0, dtype=torch.int64)

    def _draw(self, count: int) -> torch.Tensor:
        # Drawn on the device: a copy from the host would have the host wait for it.
        generator = torch.Generator(self._device).manual_seed(_SEED)
        least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        return torch.randint(least, most, (count,), generator=generator, device=self._device)

    def _one(self, flat: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        if flat.numel() == 0:
            return total
        bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int64))
        for number, chunk in enumerate(bits.split(_CHUNK)):
            total += (chunk.to(torch.int64) * self._weights[: len(chunk)]).sum() * (2 * number + 1)
        return total

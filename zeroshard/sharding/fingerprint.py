"""Fingerprints of tensors, which show whether a tensor was written, without a copy of its old values.

    fingerprint = sum of bits[i] * weights[i]  (mod 2^64)     bits: the elements, read as integers
                                                              weights: random, the same for every tensor

A change is missed with a probability of about 2^-32. Version counters do not count writes through `parameter.data`, a
NumPy array or a custom kernel. Rejected: a copy to compare with, which takes the memory of the parameters a second
time; and plain sums, which do not change when elements are permuted.
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
        """The fingerprint of each tensor: int64 (tensors,) on the device."""
        # Without the caller's modes: selective checkpointing, for one, would treat these operations as the model's.
        with torch.no_grad(), _disable_current_modes():
            flat = [tensor.detach().reshape(-1) for tensor in tensors]
            longest = min(_CHUNK, max((tensor.nbytes for tensor in flat), default=0))
            if len(self._weights) < longest:
                self._weights = self._random_weights(longest)
            found = [self._fingerprint(tensor) for tensor in flat]
            return torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=self._device)

    def free_memory(self) -> None:
        """Free the random weights; the same ones are made again when they are needed."""
        self._weights = torch.empty(0, dtype=torch.int64)

    def _random_weights(self, count: int) -> torch.Tensor:
        # Made on the device: the host would wait for a copy.
        generator = torch.Generator(self._device).manual_seed(_SEED)
        least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        return torch.randint(least, most, (count,), generator=generator, device=self._device)

    def _fingerprint(self, flat: torch.Tensor) -> torch.Tensor:
        if flat.numel() == 0:
            return torch.zeros((), dtype=torch.int64, device=self._device)
        bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int64))
        # Two kernels for each chunk: with more the host launches them for longer than they run.
        sums = [(chunk * self._weights[: len(chunk)]).sum() for chunk in bits.split(_CHUNK)]
        if len(sums) == 1:
            return sums[0]
        odd = torch.arange(1, 2 * len(sums), 2, device=self._device)
        return (torch.stack(sums) * odd).sum()

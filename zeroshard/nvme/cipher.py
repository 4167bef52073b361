"""Encryption of what goes to disk, with a key that only this process's memory has: AES-256 in counter mode.

    counter of a block's first 16 bytes   generation of the write (64 bits) | offset on disk / 16 (64 bits)

Each write has a generation of its own, kept per block in memory (8 bytes for 4 KiB), so no counter is used twice,
though the same place is written in every step and disks keep old versions of it. Generation 0 was never written and
reads as zeros. Nothing is authenticated: who can change the disk can damage a run, as by pulling it out, but read
nothing.
Rejected: XTS, whose tweak is set for each 4 KiB, which through Python takes 50 times as long as one call for a MiB.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.nvme.transfers import BLOCK

_AES_BLOCK = 16


class BlockCipher:
    """Encrypts and decrypts blocks by their place on disk.

    Raises:
        PlanError: the package `cryptography` is not installed.
    """

    def __init__(self) -> None:
        try:
            ciphers: Any = import_module("cryptography.hazmat.primitives.ciphers")
        except ImportError as error:
            raise PlanError(
                "state on disk: encrypt needs the package cryptography; pip install 'zeroshard[encrypt]'"
            ) from error
        self._key = ciphers.algorithms.AES(secrets.token_bytes(32))
        self._cipher, self._mode = ciphers.Cipher, ciphers.modes.CTR
        self._written = torch.zeros(0, dtype=torch.int64)
        self._generation = 0

    def reserve(self, nbytes: int) -> None:
        """Blocks up to there will be written."""
        more = -(-nbytes // BLOCK) - self._written.numel()
        if more > 0:
            self._written = torch.cat([self._written, torch.zeros(more, dtype=torch.int64)])

    def new_generation(self) -> int:
        """A number for one write."""
        self._generation += 1
        return self._generation

    def seal(self, at: int, source: int, target: int, nbytes: int, generation: int) -> None:
        """Encrypt memory at `source` into memory at `target`, for its place `at` on disk."""
        self._written[at // BLOCK : (at + nbytes) // BLOCK] = generation
        self._run(generation, at, source, target, nbytes)

    def unseal(self, at: int, address: int, nbytes: int) -> None:
        """Decrypt what came from the place `at` on disk, where it lies."""
        for generation, start, length in self._runs(at, nbytes):
            if generation:
                self._run(generation, at + start, address + start, address + start, length)
            else:
                ctypes.memset(address + start, 0, length)

    def _runs(self, at: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Neighbouring blocks of one write: generation, bytes from `at`, bytes."""
        written = self._written[at // BLOCK : (at + nbytes) // BLOCK]
        values, counts = torch.unique_consecutive(written, return_counts=True)
        start = 0
        for generation, count in zip(values.tolist(), counts.tolist(), strict=True):
            yield generation, start, count * BLOCK
            start += count * BLOCK

    def _run(self, generation: int, at: int, source: int, target: int, nbytes: int) -> None:
        counter = generation.to_bytes(8, "big") + (at // _AES_BLOCK).to_bytes(8, "big")
        context: Any = self._cipher(self._key, self._mode(counter)).encryptor()
        context.update_into(_memory(source, nbytes), _memory(target, nbytes))


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")

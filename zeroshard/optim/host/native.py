"""The host kernels in native code (`csrc/`): loads the library, and passes addresses to it.

The library has a plain C interface for ctypes, which releases the GIL during a call; `csrc/library.cpp` says why not
nanobind. The C++ code does not check its arguments: `HostKernel` has done so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from zeroshard.errors import UsageError
from zeroshard.native_library import load_versioned
from zeroshard.optim.host.kernel import Squares
from zeroshard.optim.host.scalars import AdagradScalars, AdamScalars, LionScalars, Scalars

LIBRARY = Path(__file__).with_name("libzeroshard_host.so")
VERSION = 2
"""What `zeroshard_host_version` must return."""
SQUARES_BLOCK = 16_384
"""Elements per partial sum of squares."""

_Scalars = ctypes.c_float * 9
_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_RULES: tuple[type[Scalars], ...] = (AdamScalars, LionScalars, AdagradScalars)
_int32, _int64, _address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class NativeBackend:
    """A Backend: one instruction set of the library.

    Args:
        number: index into `instruction_sets()`, of which the first is the fastest.
    """

    def __init__(self, library: ctypes.CDLL, number: int = 0) -> None:
        names = instruction_sets(library)
        if not 0 <= number < len(names):
            raise UsageError(f"this processor has instruction sets 0 to {len(names) - 1} ({', '.join(names)})")
        self.name = names[number]
        self._number = number
        self._step = library.zeroshard_host_step
        self._squares = library.zeroshard_host_squares
        self._stream = library.zeroshard_host_stream

    def step(
        self,
        scalars: Scalars,
        master: torch.Tensor,
        grad: torch.Tensor,
        state: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        threads: int,
    ) -> None:
        """See HostKernel."""
        numbers = _Scalars(*scalars.values)
        code = self._step(
            self._number,
            _RULES.index(type(scalars)),
            threads,
            master.numel(),
            numbers,
            master.data_ptr(),
            grad.data_ptr(),
            _DTYPES[grad.dtype],
            state[0].data_ptr(),
            state[1].data_ptr() if len(state) > 1 else None,
            _DTYPES[state[0].dtype],
            None if out is None else out.data_ptr(),
            0 if out is None else _DTYPES[out.dtype],
        )
        assert code == 0, "the library refused what was checked"

    def squares(self, grad: torch.Tensor, threads: int) -> Squares:
        """See HostKernel."""
        partial = torch.empty(-(-grad.numel() // SQUARES_BLOCK), dtype=torch.float64)
        total, bad = ctypes.c_double(), _int64()
        code = self._squares(
            self._number,
            threads,
            grad.numel(),
            grad.data_ptr(),
            _DTYPES[grad.dtype],
            partial.data_ptr(),
            ctypes.byref(total),
            ctypes.byref(bad),
        )
        assert code == 0, "the library refused what was checked"
        return Squares(total.value, None if bad.value < 0 else bad.value)

    def stream(self, a: torch.Tensor | None, b: torch.Tensor, c: torch.Tensor, scale: float, threads: int) -> None:
        """A pass over memory with hardly any arithmetic, which measures the bandwidth that a step can reach at most.

        Computes a = b + scale * c with stores that bypass the caches, 12 bytes per element; if `a` is None, multiplies
        b and c by `scale` in place, 16 bytes per element.

        Args:
            a, b, c: float32 (n,), aligned to 64 bytes, n a multiple of 32.

        Raises:
            UsageError: other tensors.
        """
        tensors = [b, c] if a is None else [a, b, c]
        if any(tensor.dtype != torch.float32 or tensor.shape != b.shape or b.dim() != 1 for tensor in tensors):
            raise UsageError("stream takes flat float32 tensors of one size")
        addresses = [None if a is None else a.data_ptr(), b.data_ptr(), c.data_ptr()]
        if self._stream(self._number, threads, b.numel(), *addresses, scale) != 0:
            raise UsageError("stream takes tensors that are aligned to 64 bytes and have a multiple of 32 elements")


@cache
def load_library(path: Path = LIBRARY) -> tuple[ctypes.CDLL | None, str]:
    """The library, or None if it can't be used, and the reason in words. Nothing is compiled."""
    library, why = load_versioned(path, "host", VERSION)
    if library is None:
        return None, why
    library.zeroshard_host_set.argtypes = [_int32]
    library.zeroshard_host_set.restype = ctypes.c_char_p
    step, squares = library.zeroshard_host_step, library.zeroshard_host_squares
    step.restype = squares.restype = library.zeroshard_host_stream.restype = _int32
    tensors = [_address, _address, _int32, _address, _address, _int32, _address, _int32]
    step.argtypes = [_int32, _int32, _int32, _int64, ctypes.POINTER(ctypes.c_float), *tensors]
    squares.argtypes = [_int32, _int32, _int64, _address, _int32, _address, _address, _address]
    library.zeroshard_host_stream.argtypes = [_int32, _int32, _int64, _address, _address, _address, ctypes.c_float]
    return library, why


def instruction_sets(library: ctypes.CDLL) -> list[str]:
    """The library's instruction sets that this processor has, the fastest first; the last is 'plain'."""
    names: list[str] = []
    while (name := library.zeroshard_host_set(len(names))) is not None:
        names.append(name.decode())
    return names

"""One optimizer step over flat tensors in host memory, in one pass: the interface, and the checks of its arguments.

    read   gradient (bf16, fp16, fp32) . master (fp32) . moments (fp32 or bf16)
    write  master . moments . compute-dtype parameter (bf16, fp16, fp32, or none)

Two backends compute it: native code (`native`) and plain PyTorch (`torch_twin`). Both do the same operations in the
same order, each rounded to nearest and none of them fused, so they give the same bits on every processor and with any
number of threads. The order is that of `kernels.adam`. A GPU, which may fuse a product with a sum, and torch.optim,
which has another order of some operations, agree up to float32 rounding. Rejected: fused multiply-add, which not every
processor has, and which is not faster since memory bandwidth is the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from zeroshard.errors import UsageError
from zeroshard.optim.host.scalars import Scalars

GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)
MOMENTS = (torch.float32, torch.bfloat16)
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
MASTER = (torch.float32,)


@dataclass(frozen=True)
class Squares:
    """What a pass over a gradient found.

    Attributes:
        total: the sum of its squares, in float64; inf or nan if an element is.
        first_bad: position of the first element that is inf or nan; None where all are finite.
    """

    total: float
    first_bad: int | None


class Backend(Protocol):
    """What computes a step. HostKernel has checked the tensors; `threads` is at least 1."""

    @property
    def name(self) -> str:
        """Instruction set, or 'torch'."""
        ...

    def step(
        self,
        scalars: Scalars,
        master: torch.Tensor,
        grad: torch.Tensor,
        state: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        threads: int,
    ) -> None: ...

    def squares(self, grad: torch.Tensor, threads: int) -> Squares: ...


@dataclass(frozen=True)
class HostKernel:
    """A backend and its number of threads. It may be called from several threads at once, and releases the GIL.

    All tensors are 1-D, contiguous, on the CPU, of the same number of elements, at any address. None may overlap
    another, except that `out` may be the memory of a gradient of the same dtype; otherwise the gradient is not changed.
    Errors are UsageErrors that name the tensor.

    Attributes:
        reason: why this backend is used, for reports.
    """

    backend: Backend
    threads: int
    reason: str

    def __str__(self) -> str:
        return f"{self.backend.name}, {self.threads} thread{'s' if self.threads > 1 else ''} ({self.reason})"

    def step(
        self,
        scalars: Scalars,
        master: torch.Tensor,
        grad: torch.Tensor,
        state: Sequence[torch.Tensor],
        out: torch.Tensor | None = None,
    ) -> None:
        """One step of the rule of `scalars`.

        Adam (arXiv:1412.6980) with coupled or decoupled decay (arXiv:1711.05101), Lion (arXiv:2302.06675, program 1) or
        Adagrad (Duchi, Hazan and Singer 2011).

        Args:
            master: float32 (n,), updated.
            grad: bfloat16, float16 or float32 (n,).
            state: `scalars.state`, all float32 or all bfloat16 (n,), updated; rounded to nearest even.
            out: bfloat16, float16 or float32 (n,), overwritten with the new master in that dtype; or None.
        """
        kinds = MOMENTS if state[0].dtype not in MOMENTS else (state[0].dtype,)
        checked = {"master": (master, MASTER), "grad": (grad, GRADIENTS)}
        if _check({**checked, **{name: (one, kinds) for name, one in zip(scalars.state, state, strict=True)}}, out):
            self.backend.step(scalars, master, grad, state, out, self.threads)

    def squares(self, grad: torch.Tensor) -> Squares:
        """The sum of squares, in float64, of a bfloat16, float16 or float32 (n,) gradient, and its first bad element.

        The order of the sum does not depend on the number of threads.
        """
        if not _check({"grad": (grad, GRADIENTS)}, None):
            return Squares(0.0, None)
        return self.backend.squares(grad, self.threads)


def _check(tensors: Mapping[str, tuple[torch.Tensor, tuple[torch.dtype, ...]]], out: torch.Tensor | None) -> bool:
    """Raises UsageError for arguments that a kernel does not take; returns False if there are no elements."""
    if out is not None:
        tensors = {**tensors, "out": (out, OUTPUTS)}
    numel = next(iter(tensors.values()))[0].numel()
    for name, (tensor, dtypes) in tensors.items():
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise UsageError(f"host kernel: {name} is {str(tensor.dtype).removeprefix('torch.')}; it takes {wanted}")
        if tensor.device.type != "cpu":
            raise UsageError(f"host kernel: {name} is on {tensor.device}; it works in host memory only")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise UsageError(
                f"host kernel: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it takes flat "
                "contiguous tensors, such as view(-1) gives"
            )
        if tensor.numel() != numel:
            raise UsageError(f"host kernel: {name} has {tensor.numel()} elements where the first tensor has {numel}")
    if numel:
        separate = {name: tensor for name, (tensor, _) in tensors.items()}
        if out is not None and (out.data_ptr(), out.dtype) == (separate["grad"].data_ptr(), separate["grad"].dtype):
            del separate["out"]  # each element is read before it is written
        _refuse_overlap(separate)
    return numel > 0


def _refuse_overlap(tensors: Mapping[str, torch.Tensor]) -> None:
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors.items())
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise UsageError(f"host kernel: {first} and {second} overlap in memory; give each memory of its own")

"""The ledger: which bytes of a traced forward and backward are alive after each operation, and what they are for.

Tensors on the meta device have storages with a size and no memory. A storage's death is seen by a weak reference, so
what autograd saves, what a checkpoint drops and what a kernel needs for a moment is counted as torch itself handles it.
Sizes are rounded as the CUDA allocator rounds them. Costs of kernels are counted on the way.

Rejected: hooks for saved tensors. They see what autograd keeps, not what is alive beside it at the peak.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.errors import PlanError
from zeroshard.planner.trace.kernels import Kernel, kernel_of
from zeroshard.planner.trace.recall import Recall, Seen

ROUNDING = 512
"""Bytes: the CUDA allocator's unit."""

aten = torch.ops.aten


class Purpose(IntEnum):
    """What an allocation of the model's own computation is for."""

    INPUTS = 0
    ACTIVATIONS = 1
    LOGITS = 2
    TEMPORARY = 3
    """Made in the backward: gradients of activations, recomputed activations."""
    GRADIENTS = 4
    """Gradients of parameters, as autograd made them, until the engine has collected them."""


Live = tuple[int, ...]
"""Bytes alive, by Purpose."""


class Ledger(TorchDispatchMode):
    """Counts what the operations under it allocate, free and cost.

    Attributes:
        purpose: what new storages are for, at the moment.
        live: bytes alive, by Purpose.
        peak: `live` when its sum was largest since `start_segment`.
        kernels: kernels launched since `start_segment`.
        where: says where the trace is, for messages.
        asked: places where the model asked for a value.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self.purpose = Purpose.ACTIVATIONS
        self.live = [0] * len(Purpose)
        self.total = 0
        self.where = where
        self.asked: list[str] = []
        self._recall = Recall()
        self._held: dict[int, tuple[weakref.ref[Any], int, Purpose]] = {}
        self.start_segment()

    def start_segment(self) -> None:
        """Forget the peak and the kernels of what has run."""
        self.peak: Live = tuple(self.live)
        self.peak_total = self.total
        self.kernels: Counter[Kernel] = Counter()

    def ignore(self, tensor: torch.Tensor) -> None:
        """A tensor that is counted elsewhere (a parameter)."""
        storage = tensor.untyped_storage()
        self._held[storage._cdata] = (weakref.ref(storage), 0, Purpose.ACTIVATIONS)

    def hold(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        """Count a tensor that was made before, or change what a counted one is for."""
        storage = tensor.untyped_storage()
        found = self._held.get(storage._cdata)
        if found is None:
            self._take(storage, purpose)
            return
        reference, nbytes, before = found
        self.live[before] -= nbytes
        self.live[purpose] += nbytes
        self._held[storage._cdata] = (reference, nbytes, purpose)

    def record(self, kernel: Kernel) -> None:
        self.kernels[kernel] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self._answer(args[0])
        key = self._recall.key(func, args, kwargs)
        seen = self._recall.find(key)
        if seen is not None:
            return self._again(seen)
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise PlanError(
                f"{self.where()}: {func} can't be traced without data ({str(error).splitlines()[0]}); a model whose "
                "shapes depend on values needs a static variant (for experts: grouped or batched products)"
            ) from error
        outputs = _tensors(result)
        for tensor in outputs:
            if tensor.layout is not torch.strided:
                raise PlanError(
                    f"{self.where()}: {func} gives a sparse tensor, which can't be planned nor trained; build its "
                    "nn.Embedding with sparse=False"
                )
            storage = tensor.untyped_storage()
            if storage._cdata not in self._held:
                self._take(storage, self.purpose)
        inputs = _tensors((args, tuple(kwargs.values())))
        kernel = kernel_of(func, args, inputs, outputs)
        if kernel is not None:
            self.kernels[kernel] += 1
        self._recall.keep(key, result, inputs, kernel)
        return result

    def _again(self, seen: Seen) -> Any:
        """An operation whose results are known: new tensors like those, and the same kernel."""
        result = seen.again()
        for tensor in _tensors(result):
            self._take(tensor.untyped_storage(), self.purpose)
        if seen.kernel is not None:
            self.kernels[seen.kernel] += 1
        return result

    def _take(self, storage: Any, purpose: Purpose) -> None:
        key, nbytes = storage._cdata, -(-storage.nbytes() // ROUNDING) * ROUNDING

        def died(_: object) -> None:
            _, size, now = self._held.pop(key)
            self.live[now] -= size
            self.total -= size

        self._held[key] = (weakref.ref(storage, died), nbytes, purpose)
        self.live[purpose] += nbytes
        self.total += nbytes
        if self.total > self.peak_total:
            self.peak_total, self.peak = self.total, tuple(self.live)

    def _answer(self, tensor: torch.Tensor) -> bool:
        """A model that asks `if (mask == 0).all()` is told yes: it looks for the ordinary case, to skip work."""
        if tensor.dtype is not torch.bool:
            raise PlanError(
                f"{self.where()}: the model reads a number out of a {tensor.dtype} tensor (.item()), and a trace has "
                "no values; plan a variant that does not depend on them"
            )
        self.asked.append(self.where())
        return True


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []

"""Counts which bytes of a traced forward and backward are alive after each operation, and what they are for.

Tensors on the meta device have storages with a size and no memory. A weak reference tells when a storage is freed, so
the count follows torch itself: what autograd saves, what a checkpoint drops, what a kernel needs for a moment. Sizes
are rounded as the CUDA allocator rounds them. The kernels that operations launch are counted along the way.

Rejected: hooks for saved tensors. They show what autograd keeps, not what else is alive at the peak.
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
from zeroshard.planner.trace.allocator import BLOCK, round_up
from zeroshard.planner.trace.kernels import Kernel, kernel_of
from zeroshard.planner.trace.operation_cache import CachedResult, OperationCache

aten = torch.ops.aten


class Purpose(IntEnum):
    """What an allocation of the model's computation is for."""

    INPUTS = 0
    ACTIVATIONS = 1
    LOGITS = 2
    TEMPORARY = 3
    """Made in the backward: gradients of activations, recomputed activations."""
    GRADIENTS = 4
    """Gradients of parameters as autograd makes them, until the engine has collected them."""


Live = tuple[int, ...]
"""Bytes alive, by Purpose."""


class Ledger(TorchDispatchMode):
    """Counts what the operations under it allocate, free and cost.

    Attributes:
        purpose: what storages are for that are made now.
        live: bytes alive, by Purpose.
        peak: `live` when its sum was largest since `start_segment`.
        kernels: kernels launched since `start_segment`.
        where: gives the unit and the pass that are traced now, for messages.
        asked: the places where the model read a value that a trace does not have.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self.purpose = Purpose.ACTIVATIONS
        self.live = [0] * len(Purpose)
        self.total = 0
        self.where = where
        self.asked: list[str] = []
        self._cache = OperationCache()
        self._held: dict[int, tuple[weakref.ref[Any], int, Purpose]] = {}
        self.start_segment()

    def start_segment(self) -> None:
        """Start to count the peak and the kernels of the next segment."""
        self.peak: Live = tuple(self.live)
        self.peak_total = self.total
        self.kernels: Counter[Kernel] = Counter()

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor (a parameter, which is counted elsewhere)."""
        storage = tensor.untyped_storage()
        self._held[storage._cdata] = (weakref.ref(storage), 0, Purpose.ACTIVATIONS)

    def hold(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        """Count a tensor that was made before the trace, or change the purpose of one that is counted."""
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
        """Count a kernel that no traced operation launches."""
        self.kernels[kernel] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self._answer(args[0])
        key = self._cache.key(func, args, kwargs)
        cached = self._cache.find(key)
        if cached is not None:
            return self._repeat(cached)
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
        self._cache.store(key, result, inputs, kernel)
        return result

    def _repeat(self, cached: CachedResult) -> Any:
        """Count an operation whose results are cached: new tensors like them, and the same kernel."""
        result = cached.new_tensors()
        for tensor in _tensors(result):
            self._take(tensor.untyped_storage(), self.purpose)
        if cached.kernel is not None:
            self.kernels[cached.kernel] += 1
        return result

    def _take(self, storage: Any, purpose: Purpose) -> None:
        key, nbytes = storage._cdata, round_up(storage.nbytes(), BLOCK)

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
        """Answer yes to a model that asks `if (mask == 0).all()`: it asks whether work can be skipped.

        Raises PlanError for a tensor of any other dtype than bool.
        """
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

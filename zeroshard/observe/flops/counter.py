"""Counts the FLOPs of what runs inside: torch's FlopCounterMode, with what is computed again kept apart.

    forward          products and attention of the forwards
    backward         those of the backwards
    again            forwards that checkpointed blocks run once more, inside of a backward

Operations are counted with their real shapes, so experts that are not chosen, attention of any kind and frozen layers
need no formula. Formulas are torch's, but for attention, where torch 2.11 fails when heads of queries share keys and
every release lacks the CPU's kernel, and for products of experts. Rejected: six FLOPs per parameter
and token, which knows neither attention nor experts, and counting modules, which misses what a forward does by itself.
What torch.compile has compiled is not seen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from zeroshard.engine.core.autograd import graph_task

_NO_BACKWARD = -1
WHOLE = "Global"
"""Under this name FlopCounterMode adds everything up."""


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Scores and their product with the values, for each head of the queries, whose keys several heads may share."""
    *heads, rows, width = query
    return 2 * math.prod(heads) * rows * key[-2] * (width + value[-1])


def _attention_backward(
    grad: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """The scores once more, and the gradients of queries, keys, values and scores."""
    *heads, rows, width = query
    return 2 * math.prod(heads) * rows * key[-2] * (3 * width + 2 * value[-1])


def _grouped_product(first: Sequence[int], second: Sequence[int], *_: Any, **__: Any) -> int:
    """Rows by rows of experts: (rows, in) x (experts, in, out), or the gradients of that."""
    batches = first[0] if len(first) == len(second) == 3 else 1
    return 2 * batches * first[-2] * first[-1] * second[-1]


_aten = torch.ops.aten
_MORE = {
    _aten._scaled_dot_product_flash_attention: _attention,
    _aten._scaled_dot_product_efficient_attention: _attention,
    _aten._scaled_dot_product_cudnn_attention: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._grouped_mm: _grouped_product,
}


class _Mode(FlopCounterMode):
    """FlopCounterMode that keeps apart what autograd computes again: forwards, so with gradients on, in a backward."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=dict(_MORE))
        self.again = 0

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet in self.flop_registry and graph_task() != _NO_BACKWARD and torch.is_grad_enabled():
            self.again += self.flop_registry[func_packet](*args, **kwargs, out_val=out)
            return out
        return super()._count_flops(func_packet, out, args, kwargs)


class Counter:
    """Adds up over several stretches.

    Attributes:
        forward, backward, again: FLOPs so far.
        by_module: FLOPs of forwards per module, by its path below the root's class name.
    """

    def __init__(self) -> None:
        self.forward = self.backward = self.again = 0
        self.by_module: dict[str, int] = defaultdict(int)

    @contextmanager
    def of_forward(self) -> Iterator[None]:
        """Count what runs inside as a forward."""
        with _Mode() as mode:
            yield
        self.forward += mode.get_total_flops()
        for name, counts in mode.get_flop_counts().items():
            if name != WHOLE:
                self.by_module[name] += sum(counts.values())

    @contextmanager
    def of_backward(self) -> Iterator[None]:
        """Count what runs inside as a backward."""
        with _Mode() as mode:
            yield
        self.backward += mode.get_total_flops()
        self.again += mode.again

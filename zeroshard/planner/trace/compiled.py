"""Estimates compiled blocks: a trace in eager mode, reduced by measured shares of what a compiler fuses.

A trace of operations does not have a compiler's kernels. What a compiler saves was measured on one model: forward and
backward alone of the benchmarks' 1.1e9 parameters, 4 x 2048 tokens, on an H100 with torch 2.11, in eager mode and with
every block compiled (benchmarks/README.md: 0.1178 and 0.1056 s, 16.88 and 14.88 GiB). Both differences are attributed
to what fusion can change, elementwise kernels and kept activations of blocks; other models have other shares. Launches
are counted as in eager mode, so that a step that is bound by the host is not predicted to be faster. Rejected: tracing
through the compiler, which needs a GPU and minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zeroshard.planner.trace.kernels import Kernel, KernelKind
from zeroshard.planner.trace.ledger import Live, Purpose
from zeroshard.planner.trace.model_trace import Segment, Trace

ELEMENTWISE = 0.584
"""Share of the elementwise kernels' time that is left: of 29.3 ms in blocks 12.2 are saved."""
ACTIVATIONS = 0.830
"""Share of the activations that is kept: of 11.80 GiB 2.00 are not."""
NOTE = "Compiled blocks are an estimate, by what compiling saved forward and backward of one model on an H100."


def compiled(traced: Trace, *, keeps_inputs_only: bool) -> Trace:
    """The trace as if all units but the root were compiled.

    Args:
        keeps_inputs_only: blocks are checkpointed, so that a compiler does not change what they keep.
    """
    kept = 1.0 if keeps_inputs_only else ACTIVATIONS
    return replace(traced, segments=tuple(_segment(segment, kept) for segment in traced.segments))


def _segment(segment: Segment, kept: float) -> Segment:
    kernels = _fused(segment.kernels) if segment.unit else segment.kernels
    return replace(segment, kernels=kernels, peak=_less(segment.peak, kept), end=_less(segment.end, kept))


def _fused(kernels: Mapping[Kernel, int]) -> dict[Kernel, int]:
    found: dict[Kernel, int] = {}
    for kernel, count in kernels.items():
        touched = kernel.kind is KernelKind.ELEMENTWISE
        fused = replace(kernel, nbytes=int(kernel.nbytes * ELEMENTWISE)) if touched else kernel
        found[fused] = found.get(fused, 0) + count
    return found


def _less(live: Live, kept: float) -> Live:
    return tuple(int(n * kept) if purpose == Purpose.ACTIVATIONS else n for purpose, n in enumerate(live))

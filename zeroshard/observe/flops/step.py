"""`flops_profiler`: the FLOPs of one whole step of an engine, all its micro-batches, forward and backward.

That step is slower, since every operation is looked at, and no other is. From then on the rates tell TFLOP/s: FLOPs of
a sample by the samples of each step, so neither the micro-batch nor their number changes them. What checkpointed blocks
compute again is told apart and counts in no rate.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from zeroshard.config.resolved import FlopsConfig
from zeroshard.engine.core.handle import Handle
from zeroshard.engine.observing import StepFacts
from zeroshard.errors import ZeroShardWarning
from zeroshard.observe.flops.counter import Counter
from zeroshard.observe.flops.table import in_words, module_lines
from zeroshard.observe.listeners import Silent
from zeroshard.observe.throughput import StepRates

_IDLE = nullcontext()


class StepFlops(Silent):
    """Counts one step of an engine.

    Args:
        after: steps of this engine that are made before it.
        told: how it is printed, on rank 0; None where it is only counted.
    """

    def __init__(self, handle: Handle, rates: StepRates, after: int, told: FlopsConfig | None) -> None:
        self._rates = rates
        self._ranks = handle.plan.dp
        self._params = sum(group.layout.parameter_numel for _, group in handle.plan.groups())
        self._told = told if handle.comm.rank == 0 else None
        self._left = after
        self.counter: Counter | None = Counter() if after == 0 else None

    def of_forward(self) -> AbstractContextManager[None]:
        """Around a forward with gradients."""
        return _IDLE if self.counter is None else self.counter.of_forward()

    def of_backward(self) -> AbstractContextManager[None]:
        """Around a backward."""
        return _IDLE if self.counter is None else self.counter.of_backward()

    def report(self, facts: StepFacts, *, due: bool) -> None:
        """A step has ended: the next one is counted, or this one was."""
        if self.counter is not None:
            self._counted(self.counter, facts)
            self.counter = None
        self._left -= 1
        if self._left == 0:
            self.counter = Counter()

    def _counted(self, counter: Counter, facts: StepFacts) -> None:
        samples = facts.batch / self._ranks
        self._rates.flops_per_sample = (counter.forward + counter.backward) / samples
        if self._told is None:
            return
        told = self._told
        text = "\n".join(
            [
                f"FLOPs of step {facts.step} on each rank: forward {in_words(counter.forward, 'FLOPs')}, backward "
                f"{in_words(counter.backward, 'FLOPs')}, computed again {in_words(counter.again, 'FLOPs')}",
                f"{samples:g} samples in {facts.micro_batches} micro-batches, {in_words(self._params)} parameters",
                *module_lines(counter.by_module, depth=told.depth, top=told.top, detailed=told.detailed),
            ]
        )
        if told.output_file is not None:
            try:
                Path(told.output_file).write_text(text + "\n", encoding="utf-8")
                return
            except OSError as error:  # it must not end the training
                what = f"flops_profiler.output_file: {told.output_file} can't be written: {error.strerror}"
                warnings.warn(f"{what}; it is printed", ZeroShardWarning, stacklevel=2)
        print(text, flush=True)

"""How fast the steps are: samples, tokens and FLOPs per second, from what each step took.

Sums of work over sums of time, so micro-batches, their number and the accumulation cancel out. The first step is left
out of the average over the run: it compiles, takes memory and learns the order of the units.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.observe.record import StepRecord


@dataclass
class _Sums:
    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    steps: int = 0

    def add(self, record: StepRecord) -> None:
        if record.whole is not None:
            self.seconds += record.whole
            self.samples += record.batch
            self.tokens += record.tokens or 0
            self.steps += 1


class StepRates:
    """The rates of one engine.

    Attributes:
        flops_per_sample: FLOPs of the model for one sample on one rank, without what is computed again; None until
            something has counted them.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._all, self._recent = _Sums(), _Sums()
        self._seen_first = False
        self.flops_per_sample: float | None = None

    def add(self, record: StepRecord) -> None:
        """Count a step."""
        self._recent.add(record)
        if self._seen_first:
            self._all.add(record)
        self._seen_first = True

    def avg_samples_per_sec(self) -> float:
        """Samples per second over all ranks, without the first step; 0.0 before the second one has ended."""
        return _rate(self._all.samples, self._all.seconds)

    def avg_tokens_per_sec(self) -> float:
        """Tokens per second over all ranks, as this rank's share says; 0.0 where no tokens were seen."""
        return _rate(self._all.tokens * self._ranks, self._all.seconds)

    def avg_tflops(self) -> float:
        """TFLOP/s of the model on this rank; 0.0 where nothing has counted its FLOPs (see `flops_profiler`)."""
        return self._tflops(self._all)

    def _tflops(self, sums: _Sums) -> float:
        per_sample = self.flops_per_sample or 0.0
        return _rate(per_sample * sums.samples / self._ranks, sums.seconds) / 1e12

    def tell(self) -> list[str]:
        """What the steps since the last call did, in words."""
        sums, self._recent = self._recent, _Sums()
        if not sums.seconds:
            return []
        told = [f"{_rate(sums.samples, sums.seconds):.4g} samples/s"]
        if sums.tokens:
            told.append(f"{_rate(sums.tokens * self._ranks, sums.seconds):.4g} tokens/s")
        if self.flops_per_sample:
            told.append(f"{self._tflops(sums):.4g} TFLOP/s per rank")
        return told


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0

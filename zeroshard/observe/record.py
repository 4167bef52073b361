"""What is known of one step once it has ended: the value that monitors, metrics, lines and the log of a run read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepRecord:
    """One step, as this rank saw it.

    Attributes:
        step, samples: its number, and the samples of all steps so far over all ranks.
        batch: samples of this step over all ranks.
        tokens: of this step on this rank; None where no input of whole numbers was seen.
        loss: mean over this rank's micro-batches; None where the script runs `loss.backward()` by itself.
        norm: of the gradients before clipping; None where nothing is known of it.
        applied: whether the parameters were updated.
        skipped: steps not applied so far.
        rates: learning rates with which the step was made.
        scale: the loss scale with which it was made; None without one.
        seconds: of forward, backward and step, over all micro-batches.
        whole: seconds of the whole step, with what lies between its parts.
        ended: time of day at which its record was complete, in seconds since 1970.
        nonfinite: the first parameter whose gradients held inf or NaN, where the step was not applied for that.
        waits, busy, host: what the host waited for and did, see `zeroshard.observe.host`; empty where nothing asks.
        device_waits: seconds that compute waited on a device, by part and by what for; None in a step without timing.
    """

    step: int
    samples: int
    batch: int
    tokens: int | None
    loss: float | None
    norm: float | None
    applied: bool
    skipped: int
    rates: Sequence[float]
    scale: float | None
    seconds: Mapping[str, float]
    whole: float | None
    ended: float
    nonfinite: str | None = None
    waits: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    busy: Mapping[str, float] = field(default_factory=dict[str, float])
    host: Mapping[str, float] = field(default_factory=dict[str, float])
    device_waits: Mapping[str, Mapping[str, float]] | None = None

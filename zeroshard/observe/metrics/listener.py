"""The numbers of one rank: kept up by the steps, and written to this rank's file by a thread, once a second.

A step only stores what it heard; formatting, reading the allocator and the disk are the thread's. A disk that fails
ends the writing with a warning and nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import torch

from zeroshard.config.resolved import MetricsConfig
from zeroshard.engine.core.handle import Handle
from zeroshard.engine.observing import Disk, StepFacts
from zeroshard.engine.outside_step.memory_use import memory_use
from zeroshard.errors import ConfigError, PlanError
from zeroshard.observe.comms import counter_of
from zeroshard.observe.host import BETWEEN, GARBAGE
from zeroshard.observe.listeners import Silent
from zeroshard.observe.memory import by_kind
from zeroshard.observe.metrics.exporter import Exporter
from zeroshard.observe.metrics.files import Histogram, RankSamples, Sample, claim, open_directory, write_samples
from zeroshard.observe.record import StepRecord
from zeroshard.observe.throughput import StepRates
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import link_traffic
from zeroshard.plan.plan import Plan
from zeroshard.planner.machine.hardware import find_gpu

BOUNDS = (
    0.001,
    0.003,
    0.01,
    0.03,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    7.5,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
)
_EVERY_SECONDS = 1.0
_LOGGER = logging.getLogger("zeroshard")


class _Times:
    """A histogram that is being filled."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._total = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._total += seconds

    def taken(self) -> Histogram:
        return Histogram(BOUNDS, tuple(self._counts), self._total)


class _Planned:
    """What follows from a plan alone, worked out once for each."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.link = link_traffic(plan)
        self.memory = by_kind(state_bytes(plan))
        self.count = counter_of(plan)


class Metrics(Silent):
    """Writes the metrics of one rank, and serves those of the node where it is the first of its run there."""

    def __init__(self, handle: Handle, rates: StepRates, asked: MetricsConfig) -> None:
        self._comm, self._runtime = handle.comm, handle.runtime
        self._rates, self._ranks = rates, handle.plan.dp
        self._folder = open_directory(asked.directory)
        try:
            self._path, number = claim(self._folder)
        except OSError as error:
            raise ConfigError(
                f"metrics.directory: nothing can be written to {self._folder}: {error.strerror}"
            ) from error
        run = asked.run or run_name(os.environ)
        self._run = run if number == 1 else f"{run}/{number}"
        self._peak = peak_flops(handle.plan, handle.device)
        self._step_seconds = _Times()
        self._parts: dict[str, _Times] = {}
        self._waits = {(BETWEEN, GARBAGE): 0.0}
        self._known: _Planned | None = None
        self._record: StepRecord | None = None
        self._tokens = 0
        self._steps = 0
        self._disk: dict[Disk, float] = {}
        self._saved: float | None = None
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._write_often, name="zeroshard-metrics", daemon=True)
        self._thread.start()
        first = int(os.environ.get("LOCAL_RANK", "0")) == 0
        self._exporter = Exporter(self._folder, asked.address, asked.port) if first else None

    def heard(self, record: StepRecord) -> None:
        """Keep what the step was."""
        self._tokens += record.tokens or 0
        if record.whole is not None:
            self._step_seconds.add(record.whole)
        for part, seconds in record.seconds.items():
            self._parts.setdefault(part, _Times()).add(seconds)
        for part, waits in record.waits.items():
            for what, seconds in waits.items():
                self._waits[part, what] = self._waits.get((part, what), 0.0) + seconds
        self._record = record

    def report(self, facts: StepFacts, *, due: bool) -> None:
        """Count the step."""
        self._steps += 1

    def disk(self, what: Disk, seconds: float, left_out: Sequence[str]) -> None:
        """Keep how long it took."""
        self._disk[what] = seconds
        if what == "save":
            self._saved = time.time()

    def close(self) -> None:
        """Write the last step, and serve no more; the file goes."""
        self._ended.set()
        self._thread.join(timeout=2 * _EVERY_SECONDS)
        if self._exporter is not None:
            self._exporter.close()
        self._path.unlink(missing_ok=True)

    def _write_often(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            if not self.write():
                return

    def write(self) -> bool:
        """Write the file now; False where the disk fails."""
        try:
            with self._writing:
                said = RankSamples(self._run, self._comm.rank, tuple(self._samples()))
                write_samples(self._path, said)
        except OSError as error:
            _LOGGER.warning("metrics of rank %d are not written from here on: %s", self._comm.rank, error)
            return False
        return True

    def _samples(self) -> Iterator[Sample]:
        ranks = str(self._comm.ranks)
        yield Sample("zeroshard_info", {"torch": torch.__version__, "ranks": ranks}, 1.0)
        yield from self._of_memory()
        yield from self._of_traffic()
        for action, seconds in tuple(self._disk.items()):
            yield Sample("zeroshard_checkpoint_seconds", {"action": action}, seconds)
        if self._saved is not None:
            yield Sample("zeroshard_checkpoint_timestamp_seconds", {}, self._saved)
        if self._record is not None:
            yield from self._of_step(self._record)

    def _planned(self) -> _Planned:
        plan = self._runtime.plan
        if self._known is None or self._known.plan is not plan:
            self._known = _Planned(plan)
        return self._known

    def _of_step(self, record: StepRecord) -> Iterator[Sample]:
        known: dict[str, float | None] = {
            "zeroshard_last_step_timestamp_seconds": record.ended,
            "zeroshard_steps_total": record.step,
            "zeroshard_skipped_steps_total": record.skipped,
            "zeroshard_samples_total": record.samples,
            "zeroshard_tokens_total": self._tokens,
            "zeroshard_loss": record.loss,
            "zeroshard_gradient_norm": record.norm,
            "zeroshard_loss_scale": record.scale,
            "zeroshard_learning_rate": record.rates[0] if record.rates else None,
        }
        if record.whole:
            known["zeroshard_samples_per_second"] = record.batch / record.whole
            if record.tokens is not None:
                known["zeroshard_tokens_per_second"] = record.tokens / record.whole
            if self._rates.flops_per_sample is not None:
                rate = self._rates.flops_per_sample * record.batch / self._ranks / record.whole
                known["zeroshard_model_flops_per_second"] = rate
                known["zeroshard_mfu_ratio"] = None if self._peak is None else rate / self._peak
        for name, value in known.items():
            if value is not None:
                yield Sample(name, {}, float(value))
        yield Sample("zeroshard_step_seconds", {}, self._step_seconds.taken())
        for part, times in tuple(self._parts.items()):
            yield Sample("zeroshard_part_seconds", {"part": part}, times.taken())
        for (part, what), seconds in tuple(self._waits.items()):
            yield Sample("zeroshard_wait_seconds_total", {"part": part, "what": what}, seconds)

    def _of_traffic(self) -> Iterator[Sample]:
        for (kind, axes), (calls, nbytes) in self._planned().count(self._comm.sent).items():
            labels = {"collective": kind, "axes": "+".join(axes)}
            yield Sample("zeroshard_sent_calls_total", labels, calls)
            yield Sample("zeroshard_sent_bytes_total", labels, nbytes)
        link = self._planned().link
        for direction, nbytes in (("to host", link.down), ("to device", link.up)):
            yield Sample("zeroshard_link_bytes_total", {"direction": direction}, nbytes * self._steps)

    def _of_memory(self) -> Iterator[Sample]:
        use = memory_use()
        found = {"process": use.resident, "host": use.host_used}
        if torch.cuda.is_available():
            found |= {"allocated": use.allocated, "peak allocated": use.peak_allocated, "reserved": use.reserved}
        for kind, nbytes in found.items():
            yield Sample("zeroshard_memory_bytes", {"kind": kind}, nbytes)
        for kind, nbytes in self._planned().memory.items():
            yield Sample("zeroshard_planned_memory_bytes", {"kind": kind}, nbytes)


def run_name(environment: Mapping[str, str]) -> str:
    """What tells the runs of a node apart: the scheduler's number, the launcher's, or the process that started it."""
    for variable in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        if environment.get(variable, "none") != "none":
            return environment[variable]
    return f"pid-{os.getppid()}"


def peak_flops(plan: Plan, device: torch.device) -> float | None:
    """The peak of this GPU in the dtype of the products; None for a card that zeroshard has no data sheet of."""
    if device.type != "cuda":
        return None
    try:
        gpu = find_gpu(torch.cuda.get_device_name(device).removeprefix("NVIDIA "))
    except PlanError:
        return None
    (dtype, *_) = (torch_dtype(group.shown_dtype) for _, group in plan.groups() if group.trainable)
    return gpu.peak(dtype) or None

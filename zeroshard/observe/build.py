"""From the config to an observer, or to none where the config asks for nothing that has to be watched."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from zeroshard.config.resolved import FilesConfig, ObserveConfig
from zeroshard.engine.core.handle import Handle
from zeroshard.nvme.memory import NvmeMemory
from zeroshard.observe import traces
from zeroshard.observe.comms import CommsLog
from zeroshard.observe.device_waits import DeviceWaits
from zeroshard.observe.flops.step import StepFlops
from zeroshard.observe.host import DISK, UPDATE, HostTimes
from zeroshard.observe.listeners import BreakdownLine, ToMonitor
from zeroshard.observe.memory import MemoryLine
from zeroshard.observe.metrics import exporter
from zeroshard.observe.metrics.listener import Metrics
from zeroshard.observe.monitor import EventMonitor, Writer
from zeroshard.observe.observer import Listener, StepObserver
from zeroshard.observe.runs.log import RunLog, rank_path
from zeroshard.observe.throughput import StepRates
from zeroshard.observe.traces import Traces
from zeroshard.observe.writers import comet, csv_files, tensorboard, wandb
from zeroshard.observe.writers.optional import optional_package


def check_packages(observe: ObserveConfig) -> None:
    """Raises ConfigError for a package that the config needs and that is not installed; equal on all ranks."""
    asked = (
        (observe.tensorboard, tensorboard.PACKAGE),
        (observe.wandb, wandb.PACKAGE),
        (observe.comet, comet.PACKAGE),
        (observe.metrics, exporter.PACKAGE),
        (observe.traces, traces.PACKAGE),
        (None if observe.traces is None else observe.traces.endpoint, traces.SENDER),
    )
    for section, package in asked:
        if section is not None:
            optional_package(*package)


def make_monitor(observe: ObserveConfig, *, first: bool) -> EventMonitor:
    """The monitor that the config asks for; it writes where `first` is true, which is so on one rank."""
    wanted = (observe.tensorboard, observe.csv, observe.wandb, observe.comet)
    return EventMonitor(_writers(observe) if first else (), enabled=any(section is not None for section in wanted))


def build_observer(observe: ObserveConfig, handle: Handle) -> StepObserver | None:
    """The observer of an engine on the model of `handle`; None where there is nothing to watch."""
    first = handle.comm.rank == 0
    monitor = make_monitor(observe, first=first)
    prints = observe.every is not None and observe.throughput
    printed = prints or observe.breakdown or observe.memory
    others = (observe.comms, observe.flops, observe.metrics, observe.run_log, observe.traces)
    if not (monitor.enabled or printed or any(asked is not None for asked in others)):
        return None
    rates = StepRates(handle.plan.dp)
    flops = None if observe.flops is None else StepFlops(handle, rates, observe.flops.profile_step, observe.flops)
    every_step = observe.every is None
    told_of_host = (observe.metrics, observe.run_log, observe.traces)
    followed = any(asked is not None for asked in told_of_host)
    host = followed_host(handle) if followed else None
    device_waits = timed_device(handle) if followed and handle.device.type == "cuda" else None
    listeners: list[Listener] = []
    if monitor.enabled and first:
        listeners.append(ToMonitor(monitor, breakdown=observe.breakdown))
    if observe.breakdown and first:
        listeners.append(BreakdownLine(every_step=every_step))
    if observe.memory and first:
        listeners.append(MemoryLine(handle, every_step=every_step))
    if observe.comms is not None:
        listeners.append(CommsLog(handle, observe.comms.ops, verbose=observe.comms.verbose))
    if observe.run_log is not None and (first or observe.run_log.ranks):
        listeners.append(RunLog(handle, rank_path(Path(observe.run_log.path), handle.comm.rank)))
    if observe.traces is not None:
        listeners.append(Traces(handle, observe.traces))
    if observe.metrics is not None:
        listeners.append(Metrics(handle, rates, observe.metrics))  # last, for it starts threads
    return StepObserver(
        handle.device, monitor, rates, listeners, flops, host, device_waits, tells_rates=observe.throughput
    )


def followed_host(handle: Handle) -> HostTimes:
    """Follow what this rank's host waits for: collectives, updates on other threads, disks, data."""
    host = HostTimes()
    comm, runtime = handle.comm, handle.runtime
    comm.watchdog.time_waits(host.waiting)
    if comm.stages is not None:
        comm.stages.watchdog.time_waits(host.waiting)
    runtime.updates.timed = partial(host.waiting, UPDATE)
    for memory in runtime.storage.tiers.values():
        if isinstance(memory, NvmeMemory):
            memory.volume.timed = partial(host.waiting, DISK)
    return host


def timed_device(handle: Handle) -> DeviceWaits:
    """Time what this rank's compute waits for on its device: gathers, reductions, copies from and to host memory."""
    waits = DeviceWaits(handle.device)
    handle.runtime.streams.time_waits(waits)
    return waits


def _writers(observe: ObserveConfig) -> list[Writer]:
    found: list[Writer] = []
    if observe.tensorboard is not None:
        found.append(tensorboard.TensorBoard(_folder(observe.tensorboard, "tensorboard")))
    if observe.csv is not None:
        found.append(csv_files.CsvFiles(_folder(observe.csv, "csv_monitor")))
    if observe.wandb is not None:
        found.append(wandb.WeightsAndBiases(observe.wandb.project, observe.wandb.group, observe.wandb.team))
    if observe.comet is not None:
        found.append(comet.Comet(observe.comet))
    return found


def _folder(files: FilesConfig, default: str) -> Path:
    return Path(files.output_path or default) / files.job_name

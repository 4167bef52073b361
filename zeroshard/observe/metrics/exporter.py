"""The exporter of a node: one process of all that could be it serves the files of every rank and every run.

    lock file    held: this process serves. Not held: another one does, and is asked again every few seconds
    port         the one of the config; where a stranger has it, the next free one of sixteen, written to `port`

The lock goes with the process that holds it, so the next run takes over by itself. All of it is a daemon thread that
only reads files: a step neither waits for it nor hears of its end. Rejected: an exporter per rank, whose ports clash
and which a hanging rank takes along, and a process of its own, which somebody would have to start and stop.
"""

from __future__ import annotations

import fcntl
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from zeroshard.observe.metrics.files import Histogram, RankSamples, Sample, read_all
from zeroshard.observe.metrics.names import COMMON, METRICS, Metric
from zeroshard.observe.writers.optional import optional_package

PACKAGE = ("prometheus_client", "prometheus-client", "metrics.enabled")
PORTS = 16
_END_SECONDS = 5.0
_LOGGER = logging.getLogger("zeroshard")


class Collector:
    """What prometheus_client asks at each scrape."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._families = optional_package(f"{PACKAGE[0]}.core", *PACKAGE[1:])

    def collect(self) -> Iterator[Any]:
        """Every metric with the values of all ranks."""
        said = list(read_all(self._folder))
        for metric in METRICS:
            yield self._family(metric, said)

    def _family(self, metric: Metric, said: list[RankSamples]) -> Any:
        kinds = self._families
        kind = {
            "gauge": kinds.GaugeMetricFamily,
            "counter": kinds.CounterMetricFamily,
            "histogram": kinds.HistogramMetricFamily,
        }[metric.kind]
        family = kind(metric.name, metric.help, labels=(*COMMON, *metric.labels))
        for rank in said:
            for sample in rank.samples:
                if sample.name == metric.name:
                    _add(family, metric, rank, sample)
        return family


def _add(family: Any, metric: Metric, rank: RankSamples, sample: Sample) -> None:
    labels = [rank.run, str(rank.rank), *(sample.labels[label] for label in metric.labels)]
    if not isinstance(sample.value, Histogram):
        family.add_metric(labels, sample.value)
        return
    below, buckets = 0, []
    for bound, count in zip((*sample.value.bounds, "+Inf"), sample.value.counts, strict=True):
        below += count
        buckets.append((str(bound), below))
    family.add_metric(labels, buckets=buckets, sum_value=sample.value.total)


class Exporter:
    """Serves, or waits to serve, the files of a folder until `close`.

    Args:
        again: seconds after which one that does not serve asks for the lock again.
    """

    def __init__(self, folder: Path, address: str, port: int, again: float = 5.0) -> None:
        self._folder, self._address, self._port, self._again = folder, address, port, again
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeroshard-exporter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            with (self._folder / "exporter.lock").open("a") as lock:
                if _locked(lock):
                    self._serve()
                    return
            self._ended.wait(self._again)

    def _serve(self) -> None:
        """Serve until `close`, holding the lock."""
        client = optional_package(*PACKAGE)
        registry = client.CollectorRegistry()
        registry.register(Collector(self._folder))
        failed: Exception | None = None
        for port in range(self._port, self._port + PORTS):
            try:
                server, _ = client.start_http_server(port, addr=self._address, registry=registry)
            except (OSError, OverflowError) as error:  # a stranger's, beyond the last, or no address of this node
                failed = error
                continue
            self._tell(port)
            _LOGGER.info("metrics of this node: http://%s:%d/metrics", self._address, port)
            self._ended.wait()
            server.shutdown()
            server.server_close()
            return
        last = self._port + PORTS - 1
        _LOGGER.warning(
            "metrics: no port from %d to %d of %s can be had (%s); nothing is served",
            self._port,
            last,
            self._address,
            failed,
        )
        self._ended.wait()

    def _tell(self, port: int) -> None:
        try:
            (self._folder / "port").write_text(f"{port}\n", encoding="utf-8")
        except OSError as error:  # a full disk; whoever knows the port is served all the same
            _LOGGER.warning("metrics: %s can't be written: %s", self._folder / "port", error)

    def close(self) -> None:
        """Serve no more."""
        self._ended.set()
        self._thread.join(timeout=_END_SECONDS)


def _locked(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

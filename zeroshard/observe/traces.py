"""`opentelemetry`: a span for each step and each checkpoint, with the bill of the step as its attributes.

    zeroshard.step    zeroshard.step 12, .rank 0, .loss 2.3, .seconds.forward 0.12, .wait.forward.all-gather 0.03, ...
    zeroshard.save    zeroshard.rank 0

Spans are made from the records of steps, after all of their numbers have arrived: begin and end are given, so that
nothing is timed a second time and nothing waits. They go to the provider that the program has set; with an endpoint, to
one of zeroshard's own, whose thread sends them. Rejected: spans for each part, of which the device has no times of day.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from zeroshard.config.resolved import TracesConfig
from zeroshard.engine.core.handle import Handle
from zeroshard.engine.observing import Disk
from zeroshard.observe.device_waits import merged
from zeroshard.observe.listeners import Silent
from zeroshard.observe.record import StepRecord
from zeroshard.observe.writers.optional import optional_package

PACKAGE = ("opentelemetry.sdk.trace", "opentelemetry-sdk", "opentelemetry.enabled")
SENDER = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.endpoint",
)
_NAME = "zeroshard"
_TIMEOUT_SECONDS = 2
_NANO = 10**9


class Traces(Silent):
    """Makes the spans of one rank."""

    def __init__(self, handle: Handle, asked: TracesConfig) -> None:
        self._rank = handle.comm.rank
        self._own = None if asked.endpoint is None else _provider(asked.endpoint)
        provider = optional_package("opentelemetry.trace", *PACKAGE[1:]) if self._own is None else self._own
        self._tracer = provider.get_tracer(_NAME)

    def heard(self, record: StepRecord) -> None:
        """The span of a step."""
        self._span("step", record.ended, record.whole or 0.0, attributes_of(record))

    def disk(self, what: Disk, seconds: float, left_out: Sequence[str]) -> None:
        """The span of a checkpoint that was saved or loaded."""
        self._span(what, time.time(), seconds, {"left_out": list(left_out)} if left_out else {})

    def _span(self, name: str, end: float, seconds: float, attributes: dict[str, Any]) -> None:
        told = {f"{_NAME}.{key}": value for key, value in {"rank": self._rank, **attributes}.items()}
        begin = int((end - seconds) * _NANO)
        self._tracer.start_span(f"{_NAME}.{name}", start_time=begin, attributes=told).end(end_time=int(end * _NANO))

    def close(self) -> None:
        """Send what is left; an endpoint that does not answer is given up after some seconds."""
        if self._own is not None:
            self._own.shutdown()


def attributes_of(record: StepRecord) -> dict[str, Any]:
    """The attributes of a step's span, without their prefix; what is not known is left out."""
    plain = {
        "step": record.step,
        "samples": record.samples,
        "tokens": record.tokens,
        "loss": record.loss,
        "norm": record.norm,
        "applied": record.applied,
        "scale": record.scale,
        "rate": record.rates[0] if record.rates else None,
        "nonfinite": record.nonfinite,
    }
    seconds = {f"seconds.{part}": spent for part, spent in record.seconds.items()}
    both = merged(record.waits, record.device_waits or {})
    waits = {f"wait.{part}.{kind}": spent for part, kinds in both.items() for kind, spent in kinds.items()}
    return {name: value for name, value in {**plain, **seconds, **waits}.items() if value is not None}


def _provider(endpoint: str) -> Any:
    """A provider that sends to an OTLP endpoint over HTTP."""
    sdk = optional_package(*PACKAGE)
    batches = optional_package("opentelemetry.sdk.trace.export", *PACKAGE[1:])
    resources = optional_package("opentelemetry.sdk.resources", *PACKAGE[1:])
    sender = optional_package(*SENDER).OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_SECONDS)
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": _NAME}))
    provider.add_span_processor(batches.BatchSpanProcessor(sender))
    return provider

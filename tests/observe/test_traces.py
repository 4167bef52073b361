"""Each step and checkpoint is a span of OpenTelemetry, with the bill of the step; without the package it is refused."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.test_initialize import CONFIG, start, train
from zeroshard.errors import ConfigError
from zeroshard.observe import traces


class Provider:
    """Stands for a provider of OpenTelemetry, and keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, int, int, dict[str, Any]]] = []

    def get_tracer(self, name: str) -> Provider:
        assert name == "zeroshard"
        return self

    def start_span(self, name: str, *, start_time: int, attributes: dict[str, Any]) -> Span:
        return Span(self, name, start_time, attributes)


class Span:
    def __init__(self, provider: Provider, name: str, begin: int, attributes: dict[str, Any]) -> None:
        self._provider, self._told = provider, (name, begin, attributes)

    def end(self, end_time: int) -> None:
        name, begin, attributes = self._told
        self._provider.spans.append((name, begin, end_time, attributes))


def test_steps_and_checkpoints_are_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Provider()
    monkeypatch.setattr(traces, "optional_package", lambda *_: provider)
    monkeypatch.setattr("zeroshard.observe.build.optional_package", lambda *_: provider)
    before = time.time_ns()
    engine, _ = start({**CONFIG, "opentelemetry": {"enabled": True}})
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    assert [name for name, *_ in provider.spans] == ["zeroshard.step", "zeroshard.step", "zeroshard.save"]
    for name, begin, end, attributes in provider.spans:
        assert before < begin < end < time.time_ns()
        assert attributes["zeroshard.rank"] == 0
        if name == "zeroshard.step":
            parts = [attributes[f"zeroshard.seconds.{part}"] for part in ("forward", "backward", "step")]
            assert 0 < sum(parts) * 1e9 <= (end - begin) * 1.01
            assert {"zeroshard.loss", "zeroshard.norm", "zeroshard.step", "zeroshard.applied"} <= attributes.keys()


def test_without_the_package_the_config_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.sdk.trace"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"opentelemetry\.enabled: .*pip install opentelemetry-sdk"):
        start({**CONFIG, "opentelemetry": {"enabled": True}})
    engine, _ = start({**CONFIG, "opentelemetry": {"enabled": False}})
    engine.destroy()


def test_the_sdk_takes_the_spans(tmp_path: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    simple = pytest.importorskip("opentelemetry.sdk.trace.export").SimpleSpanProcessor
    api = pytest.importorskip("opentelemetry.trace")
    kept = export.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(simple(kept))
    api.set_tracer_provider(provider)
    engine, _ = start({**CONFIG, "opentelemetry": {"enabled": True}})
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    spans = kept.get_finished_spans()
    assert [span.name for span in spans] == ["zeroshard.step", "zeroshard.step", "zeroshard.save"]
    assert spans[0].attributes["zeroshard.step"] == 1
    assert spans[0].end_time > spans[0].start_time


def test_an_endpoint_that_is_not_there_harms_no_step() -> None:
    pytest.importorskip(traces.SENDER[0])
    engine, _ = start({**CONFIG, "opentelemetry": {"enabled": True, "endpoint": "http://127.0.0.1:9/v1/traces"}})
    train(engine, 2)
    begin = time.monotonic()
    engine.destroy()
    assert time.monotonic() - begin < 10
    assert engine.global_steps == 2

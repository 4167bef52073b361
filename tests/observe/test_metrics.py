"""One exporter per node serves what every rank says; its end, a taken port or a full disk is nothing to a step."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.support.ports import free_port
from tests.test_initialize import CONFIG, loss_of, start, train
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import ConfigError, UsageError
from zeroshard.observe.metrics.exporter import Exporter
from zeroshard.observe.metrics.files import RankSamples, Sample, claim, open_directory, read_all, write_samples
from zeroshard.observe.metrics.listener import Metrics, run_name
from zeroshard.observe.metrics.names import METRICS, series_names

DATA = resources.files("zeroshard.observe") / "data"
ALERTS, DASHBOARD = (DATA / "alerts.yml").read_text(), (DATA / "dashboard.json").read_text()
CASES = Path(__file__).with_name("alerts_test.yml")


def scraped(folder: Path) -> str:
    """What the exporter of this folder answers."""
    port = until(lambda: (folder / "port").read_text().strip() if (folder / "port").exists() else "")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return answer.read().decode()


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (value := found()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return value


def _listener(engine: Any) -> Metrics:
    (found,) = (listener for listener in engine._observer._listeners if isinstance(listener, Metrics))
    return found


def _measured(rank: int, world: int, folder: str, port: int) -> str:
    asked = {"enabled": True, "directory": folder, "port": port, "run": "first"}
    more = {
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "flops_profiler": {"enabled": True, "output_file": f"{folder}/f"},
    }
    engine, _ = start({**CONFIG, **more, "zero_optimization": {"stage": 2}, "metrics": asked})
    for step in range(3):
        engine.backward(loss_of(engine, step, 0, rank))
        engine.step()
    engine.save_checkpoint(f"{folder}/saved")
    assert _listener(engine).write()
    dist.barrier()
    answer = scraped(Path(folder)) if rank == 0 else ""
    dist.barrier()
    engine.destroy()
    assert not list(Path(folder).glob(f"rank-{os.getpid()}*")), "the file of a rank goes with its engine"
    return answer


def test_every_metric_of_every_rank_is_served_by_one_exporter(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    answer, _ = run_ranks(2, _measured, str(tmp_path), free_port())
    absent = {"zeroshard_mfu_ratio", "zeroshard_tokens_per_second"}  # of GPUs, and of models that read tokens
    for metric in METRICS:
        name = f"{metric.name}_bucket" if metric.kind == "histogram" else metric.name
        for rank in (0, 1):
            said = re.search(rf'^{name}{{[^}}]*rank="{rank}"[^}}]*}}', answer, re.MULTILINE)
            assert (said is not None) is (metric.name not in absent), (name, rank)
    assert 'zeroshard_steps_total{rank="0",run="first"} 3.0' in answer
    assert 'zeroshard_samples_total{rank="1",run="first"} 24.0' in answer
    assert 'zeroshard_loss_scale{rank="0",run="first"} 16.0' in answer
    assert 'zeroshard_step_seconds_count{rank="1",run="first"} 3.0' in answer
    labels = 'axes="dp_shard",collective="reduce-scatter",rank="0",run="first"'
    sent = re.search(f"zeroshard_sent_bytes_total{{{labels}}} (.+)", answer)
    assert sent is not None
    assert float(sent[1]) > 0


def test_a_step_neither_needs_the_exporter_nor_a_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    folder = tmp_path / "metrics"
    engine, _ = start({**CONFIG, "metrics": {"enabled": True, "directory": str(folder), "port": free_port()}})
    train(engine, 1)
    metrics = _listener(engine)
    assert metrics.write()
    assert metrics._exporter is not None
    metrics._exporter.close()
    train(engine, 2, first=1)
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING, "zeroshard"):
        assert not metrics.write()
    assert "metrics of rank 0 are not written from here on: " in caplog.text
    train(engine, 1, first=3)
    assert engine.global_steps == 4
    engine.destroy()


def test_two_runs_share_the_port_and_the_second_takes_over_when_the_first_ends(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    said = RankSamples("run", 0, (Sample("zeroshard_loss", {}, 2.5),))
    write_samples(claim(tmp_path)[0], said)
    port = free_port()
    first = Exporter(tmp_path, "127.0.0.1", port)
    assert 'zeroshard_loss{rank="0",run="run"} 2.5' in scraped(tmp_path)
    assert (tmp_path / "port").read_text() == f"{port}\n"
    (tmp_path / "port").unlink()
    second = Exporter(tmp_path, "127.0.0.1", port, again=0.05)
    time.sleep(0.2)
    assert not (tmp_path / "port").exists(), "the first one serves"
    first.close()
    assert "zeroshard_loss" in scraped(tmp_path)
    second.close()


def test_two_engines_of_a_process_are_two_runs(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    asked = {"enabled": True, "directory": str(tmp_path), "port": free_port(), "run": "both"}
    engines = [start({**CONFIG, "metrics": asked})[0] for _ in range(2)]
    for engine in engines:
        assert _listener(engine).write()
    assert [said.run for said in read_all(tmp_path)] == ["both", "both/2"]
    for engine in engines:
        engine.destroy()
    assert list(read_all(tmp_path)) == []


def test_an_engine_that_could_not_be_built_leaves_no_thread(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    asked = {"enabled": True, "directory": str(tmp_path), "port": free_port()}
    before = threading.active_count()
    with pytest.raises(UsageError, match="a loader's dataset"):
        start({**CONFIG, "metrics": asked}, training_data=5)
    assert until(lambda: threading.active_count() <= before)
    assert list(tmp_path.glob("rank-*")) == []


def test_a_port_of_a_stranger_is_passed_by(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        exporter = Exporter(tmp_path, "127.0.0.1", taken)
        assert "zeroshard_loss" in scraped(tmp_path)
        assert taken < int((tmp_path / "port").read_text()) < taken + 16
        exporter.close()


def test_an_address_of_another_host_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    with caplog.at_level(logging.WARNING, "zeroshard"):
        exporter = Exporter(tmp_path, "192.0.2.1", 9464)
        assert until(lambda: "to 9479 of 192.0.2.1 can be had (" in caplog.text)
    exporter.close()
    assert "assign requested address" in caplog.text


def test_a_port_that_cannot_be_written_down_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    (tmp_path / "port").symlink_to("/dev/full")
    port = free_port()
    with caplog.at_level(logging.WARNING, "zeroshard"):
        exporter = Exporter(tmp_path, "127.0.0.1", port)
        assert until(lambda: "port can't be written: [Errno 28]" in caplog.text)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"zeroshard_loss" in answer.read()
    exporter.close()


def test_a_rank_that_died_is_not_told_of(tmp_path: Path) -> None:
    said = RankSamples("run", 3, (Sample("zeroshard_loss", {}, 2.5),))
    mine, _ = claim(tmp_path)
    assert list(read_all(tmp_path)) == [], "it has said nothing yet"
    write_samples(mine, said)
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f"rank-{gone.pid}-1.json").write_text(mine.read_text())
    assert list(read_all(tmp_path)) == [said]
    assert not (tmp_path / f"rank-{gone.pid}-1.json").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"metrics\.directory: .*file can't be made"):
        open_directory(str(tmp_path / "file"))
    assert open_directory(str(tmp_path / "own")).stat().st_mode & 0o077 == 0
    assert run_name({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "8"}) == "7"
    assert run_name({"TORCHELASTIC_RUN_ID": "none"}) == f"pid-{os.getppid()}"


def test_a_run_without_metrics_has_no_thread_of_them() -> None:
    engine, _ = start({**CONFIG, "steps_per_print": 2})
    assert not any(isinstance(listener, Metrics) for listener in engine._observer._listeners)
    assert handle_of(engine.module).comm.sent is not None
    engine.destroy()


def queries() -> list[str]:
    return [target["expr"] for panel in json.loads(DASHBOARD)["panels"] for target in panel["targets"]]


def alerts() -> dict[str, str]:
    return {
        block.splitlines()[0]: block[block.index("expr:") : block.index("for:")]
        for block in ALERTS.split("- alert: ")[1:]
    }


def test_dashboard_and_alerts_name_only_what_is_exported() -> None:
    named = {name for text in (*queries(), *alerts().values()) for name in re.findall(r"\bzeroshard_\w+", text)}
    assert named <= series_names()
    assert named >= {"zeroshard_loss", "zeroshard_step_seconds_bucket", "zeroshard_sent_bytes_total"}
    shown = {name for text in queries() for name in re.findall(r"\bzeroshard_\w+", text)}
    unseen = [m.name for m in METRICS if not any(name.startswith(m.name) for name in shown)]
    assert unseen == ["zeroshard_info"], "what is exported is on the dashboard"


def test_every_alert_has_a_series_that_makes_it_fire() -> None:
    fired = re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", CASES.read_text())
    silent = re.findall(r"alertname: (\w+)\n\s+exp_alerts: \[\]", CASES.read_text())
    assert set(fired) == set(silent) == set(alerts())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_sees_every_alert_fire_and_stay_silent(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(ALERTS)
    shutil.copy(CASES, tmp_path)
    shutil.copy(str(DATA / "prometheus.yml"), tmp_path)
    for command in (
        ["check", "rules", "alerts.yml"],
        ["test", "rules", CASES.name],
        ["check", "config", "--syntax-only", "prometheus.yml"],
    ):
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

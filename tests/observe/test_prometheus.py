"""A real Prometheus scrapes a run, and answers every query of the dashboard and every rule from it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.observe.test_metrics import ALERTS, alerts, queries, until
from tests.support.ports import free_port
from tests.test_initialize import CONFIG, start, train

SERVER = shutil.which("prometheus")
EMPTY = ("zeroshard_mfu_ratio", "zeroshard_tokens_per_second", "zeroshard_sent_", "zeroshard_loss_scale")
"""Of GPUs, of models that read tokens, of several ranks, and of fp16."""
CONFIGURED = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: zeroshard
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[str]:
    """A server that scrapes this port; its address."""
    assert SERVER is not None
    listens = free_port()
    (folder / "alerts.yml").write_text(ALERTS)
    (folder / "prometheus.yml").write_text(CONFIGURED.format(rules=folder / "alerts.yml", port=port))
    options = ("--config.file", "prometheus.yml", "--storage.tsdb.path", "data", "--log.level", "error")
    command = [SERVER, *options, "--web.listen-address", f"127.0.0.1:{listens}"]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{listens}"
    finally:
        server.terminate()
        server.wait()


def ask(address: str, query: str) -> list[Any]:
    text = urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(f"{address}/api/v1/query?{text}", timeout=20) as answer:
        found = json.load(answer)
    assert found["status"] == "success", query
    return found["data"]["result"]


def is_up(address: str) -> bool:
    try:
        return bool(ask(address, "zeroshard_step_seconds_count >= 3"))
    except OSError:
        return False


@pytest.mark.skipif(SERVER is None, reason="prometheus is not installed")
def test_every_query_of_the_dashboard_has_an_answer(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    asked = {"enabled": True, "directory": str(tmp_path / "metrics"), "port": port}
    flops = {"enabled": True, "output_file": str(tmp_path / "flops")}
    engine, _ = start({**CONFIG, "metrics": asked, "flops_profiler": flops})
    train(engine, 3)
    engine.save_checkpoint(tmp_path / "saved")
    with prometheus(tmp_path, port) as address:
        until(lambda: is_up(address))
        time.sleep(1.0)  # two scrapes, which a rate needs
        for query in queries():
            told = ask(address, query.replace("$run", ".*"))
            assert bool(told) is not any(name in query for name in EMPTY), query
        for rule in alerts().values():
            ask(address, rule.partition("|")[2])
        assert ask(address, 'up{job="zeroshard"}')[0]["value"][1] == "1"
    engine.destroy()

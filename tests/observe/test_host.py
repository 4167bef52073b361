"""What the host waits for is told by part and by kind, each moment once, and only of the thread that is followed."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
from torch.utils.data import TensorDataset

import zeroshard
from tests.support.distributed import run_ranks
from tests.test_initialize import CONFIG, batch, build, start, train
from zeroshard.observe.host import BETWEEN, DATA, DISK, GARBAGE, HostTimes
from zeroshard.observe.runs.components import components_of
from zeroshard.observe.runs.log import read_ranks


def test_a_moment_belongs_to_the_innermost_wait() -> None:
    host = HostTimes()
    begin = time.perf_counter()
    with host.part("forward"), host.waiting("all-gather"):
        time.sleep(0.02)
        with host.waiting(DISK):
            time.sleep(0.03)
        gc.collect()
    seconds = time.perf_counter() - begin
    step = host.take()
    host.close()
    waits = step.waits["forward"]
    assert set(waits) == {"all-gather", DISK, GARBAGE}
    assert waits["all-gather"] >= 0.02
    assert waits[DISK] >= 0.03
    assert sum(waits.values()) <= seconds, "each moment counts once"
    assert step.waits.keys() == {"forward"}


def test_the_collector_counts_where_nothing_is_waited_for_and_is_left_alone_afterwards() -> None:
    before = list(gc.callbacks)
    host = HostTimes()
    gc.collect()
    assert host.take().waits[BETWEEN][GARBAGE] > 0
    host.close()
    assert gc.callbacks == before


def test_other_threads_count_where_they_wait_for_a_disk() -> None:
    host = HostTimes()

    def wait() -> None:
        for kind in (DISK, "all-gather"):
            with host.waiting(kind):
                time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    step = host.take()
    host.close()
    assert step.waits == {}
    assert step.figures["disk"] >= 0.01
    assert "disk" not in host.take().figures


def test_waits_for_batches_are_waits_for_data() -> None:
    host = HostTimes()
    batches = host.timed(iter(range(3)))
    assert next(batches) == 0
    assert list(batches) == [1, 2]
    assert set(host.take().waits[BETWEEN]) == {DATA}
    host.close()


def test_what_came_before_the_first_forward_belongs_to_no_step() -> None:
    host = HostTimes()
    with host.waiting(DATA):
        pass
    host.restart()
    assert host.take().waits == {}
    host.close()


def _trained(rank: int, world: int, folder: str) -> None:
    rows = TensorDataset(batch(0).repeat(8, 1))
    for stage in (1, 3):
        config = {**CONFIG, "zero_optimization": {"stage": stage}, "run_log": {"path": f"{folder}/{stage}/run.jsonl"}}
        engine, _, loader, _ = zeroshard.initialize(model=build(), config=config, training_data=rows)
        assert loader is not None
        for (inputs,) in loader:
            engine.backward(engine(inputs).square().mean())
            engine.step()
        engine.destroy()


def test_components_sum_up_to_the_step_within_a_percent_on_each_rank(tmp_path: Path) -> None:
    run_ranks(2, _trained, str(tmp_path))
    for stage in (1, 3):
        runs = read_ranks(tmp_path / str(stage) / "run.jsonl")
        assert sorted(runs) == [0, 1]
        for run in runs.values():
            assert len(run.steps) == 4
            kinds = {kind for step in run.steps for _, kind in components_of(step)}
            assert {"all-reduce", DATA} <= kinds, "a gather may have ended before it is waited for"
            for step in run.steps:
                assert sum(components_of(step).values()) == pytest.approx(step.whole, rel=0.01)


def test_only_rank_0_writes_where_the_config_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run_ranks(2, _logged, str(path))
    assert sorted(read_ranks(path)) == [0]
    assert list(tmp_path.iterdir()) == [path]


def _logged(rank: int, world: int, path: str) -> None:
    engine, _ = start({**CONFIG, "run_log": {"path": path, "ranks": False}})
    train(engine, 2)
    engine.destroy()

"""Ranks that no longer fit together end in a clear error on every rank, and slow ranks in none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.support.forked import start
from zeroshard.checkpoint.error_barrier import StoreBarrier, on_all_ranks
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.mesh import RankMesh, build_mesh
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.watchdog import EXIT_CODE, Watchdog
from zeroshard.errors import DivergenceError, ZeroShardError
from zeroshard.mesh import DATA

LIMIT_S = 10.0
# The logs are compared after a wait of this long: a tenth of what a run has, where a test is not about that time.
SOON: dict[str, float] = {"patience_s": 0.4, "poll_s": 0.2}


@dataclass
class _Rank:
    rank: int
    mesh: RankMesh
    log: OperationLog
    watchdog: Watchdog
    comm: Collectives

    def gather(self, unit: str, n: int = 4) -> None:
        out = torch.zeros(n * self.mesh.world_size)
        self.comm.wait(self.comm.all_gather(out, torch.ones(n), unit))

    def reduce(self, unit: str, n: int = 4) -> None:
        full = torch.zeros(n * self.mesh.world_size)
        self.comm.wait(self.comm.reduce_scatter(full[:n].clone(), full, unit))


def _join(rank: int, world_size: int, times: Mapping[str, float] = SOON) -> _Rank:
    mesh, log = build_mesh(), OperationLog()
    watchdog = Watchdog(mesh.store(), rank, world_size, log, **times)
    comm = Collectives(mesh.over(DATA).gather, "dp", log, watchdog)
    joined = _Rank(rank, mesh, log, watchdog, comm)
    joined.gather("embedding")
    return joined


@dataclass(frozen=True)
class _Outcome:
    kind: str
    text: str
    seconds: float


def _outcome(me: _Rank, body: Callable[[_Rank], None]) -> _Outcome:
    began = time.monotonic()
    try:
        body(me)
    except ZeroShardError as error:
        return _Outcome(type(error).__name__, str(error), time.monotonic() - began)
    finally:
        me.watchdog.close()
    return _Outcome("none", "", time.monotonic() - began)


def _mix(me: _Rank) -> None:
    me.gather("layers.4" if me.rank == 1 else "layers.3")
    mine = torch.tensor([me.log.digest()])
    digests = torch.zeros(me.mesh.world_size, dtype=torch.int64)
    me.comm.wait(me.comm.all_gather(digests, mine, "digests"))
    assert digests.unique().numel() > 1
    me.watchdog.explain_mismatch()


def _skip_and_reduce(me: _Rank) -> None:
    me.gather("layers.0")
    if me.rank != 1:
        me.gather("layers.1")
    me.reduce("layers.1")


def _leave_early(me: _Rank) -> None:
    if me.rank != 1:
        me.gather("layers.0")


def _sleep_in_compute(me: _Rank) -> None:
    if me.rank == 1:
        time.sleep(2)
    me.gather("layers.0")
    me.reduce("layers.0")


def _be_killed(me: _Rank) -> None:
    me.gather("layers.0")
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    me.reduce("layers.7")


def _run(rank: int, world_size: int, body: Callable[[_Rank], None], times: Mapping[str, float] = SOON) -> _Outcome:
    return _outcome(_join(rank, world_size, times), body)


@pytest.mark.parametrize("world_size", [2, 3])
def test_operations_of_equal_size_that_mix_are_named_at_the_end_of_the_step(world_size: int) -> None:
    others = "rank 0" if world_size == 2 else "ranks 0, 2"
    for outcome in run_ranks(world_size, _run, _mix):
        assert outcome.kind == "DivergenceError"
        assert outcome.text.startswith(
            f"{others} issued all-gather of unit layers.3 as operation 2 "
            "where rank 1 issued all-gather of unit layers.4."
        )


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_block_skipped_on_one_rank_ends_within_ten_seconds(world_size: int) -> None:
    for outcome in run_ranks(world_size, _run, _skip_and_reduce, {} if world_size == 3 else SOON):
        assert outcome.kind == "DivergenceError"
        # On a busy machine a rank may answer too late to be among those that are compared; rank 1 is named either way.
        assert "rank 1 issued reduce-scatter of unit layers.1" in outcome.text
        assert "issued all-gather of unit layers.1" in outcome.text
        assert "as operation 3" in outcome.text
        assert outcome.seconds < LIMIT_S


def test_a_rank_that_closes_early_is_named_to_those_that_wait_for_it() -> None:
    first, second, third = run_ranks(3, _run, _leave_early)
    assert second.kind == "none"
    assert first.text == third.text
    assert first.text.startswith("rank 1 left after all-gather of unit embedding (operation 1) while rank")
    assert "waited for all-gather of unit layers.0 (operation 2 of its log)" in first.text
    assert max(first.seconds, third.seconds) < LIMIT_S


def test_a_slow_rank_raises_nothing() -> None:
    for outcome in run_ranks(2, _run, _sleep_in_compute):
        assert outcome.kind == "none"
        assert outcome.seconds > 1


def _survive(rank: int, world_size: int, directory: str) -> None:
    outcome = _outcome(_join(rank, world_size), _be_killed)
    with open(f"{directory}/{rank}", "w") as file:
        file.write(f"{outcome.kind}|{outcome.seconds}|{outcome.text}")


def test_the_others_name_a_rank_that_was_killed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 failed first:\ndied without a report: killed by SIGKILL"):
        run_ranks(3, _survive, str(tmp_path))
    texts = []
    for rank in (0, 2):
        with open(f"{tmp_path}/{rank}") as file:
            kind, seconds, text = file.read().split("|")
        assert kind == "ZeroShardError"
        assert float(seconds) < LIMIT_S
        assert text.startswith("rank 1 died (process ")
        assert "waited for reduce-scatter of unit layers.7 (operation 3 of its log)" in text
        texts.append(text)
    assert texts[0] == texts[1]


def _over_tcp(rank: int, world_size: int, directory: str, body: Callable[[_Rank], None]) -> None:
    """As `_run`, over a store that rank 0 hosts, as it does without a launcher; the outcome goes to a file."""
    meeting = build_mesh().store()
    assert meeting is not None
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if server is not None:
        meeting.set("port", str(server.port))
    store = server or dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False)
    mesh, log = build_mesh(), OperationLog()
    watchdog = Watchdog(store, rank, world_size, log, **SOON)
    comm = Collectives(mesh.over(DATA).gather, "dp", log, watchdog)
    outcome = _outcome(_Rank(rank, mesh, log, watchdog, comm), body)
    Path(directory, str(rank)).write_text(f"{outcome.kind}|{outcome.seconds}|{outcome.text}")


def _host_is_killed(me: _Rank) -> None:
    me.gather("layers.0")
    if me.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    me.reduce("layers.7")


def test_the_others_say_so_when_the_host_of_the_store_is_killed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0 failed first"):
        run_ranks(3, _over_tcp, str(tmp_path), _host_is_killed)
    for rank in (1, 2):
        kind, seconds, text = (tmp_path / str(rank)).read_text().split("|")
        assert kind == "ZeroShardError"
        assert float(seconds) < LIMIT_S
        assert text.startswith(
            f"the store that ranks meet in is gone while rank {rank} waited for reduce-scatter of unit layers.7: rank 0"
        )


def test_a_divergence_reaches_everybody_over_tcp_although_the_host_leaves_with_it(tmp_path: Path) -> None:
    run_ranks(3, _over_tcp, str(tmp_path), _skip_and_reduce)
    for rank in range(3):
        assert "DivergenceError" in (tmp_path / str(rank)).read_text()


def _other_size(me: _Rank) -> None:
    if me.rank == 1:
        me.gather("head", 1000)
    else:
        me.gather("layers.3", 4)
    me.gather("layers.4")


def _abort(rank: int, world_size: int, directory: str) -> None:
    # gloo aborts the process of at least one rank; what it leaves behind is its stderr.
    with open(f"{directory}/{rank}", "w") as file:
        os.dup2(file.fileno(), 2)
        sys.stderr = file
        outcome = _outcome(_join(rank, world_size), _other_size)
        print(f"{outcome.kind}: {outcome.text} {outcome.seconds}", file=file, flush=True)
        time.sleep(3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_operations_of_unequal_size_are_named_though_gloo_aborts(tmp_path: Path, world_size: int) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="died without a report: killed by SIGABRT"):
        run_ranks(world_size, _abort, str(tmp_path))
    assert time.monotonic() - began < LIMIT_S
    others = "rank 0" if world_size == 2 else "ranks 0, 2"
    for rank in range(world_size):
        assert (
            f"DivergenceError: {others} issued all-gather of unit layers.3 as operation 2 "
            "where rank 1 issued all-gather of unit head." in (tmp_path / str(rank)).read_text()
        )


def _two_models(rank: int, world_size: int) -> tuple[str, bool]:
    one, two = _join(rank, world_size), _join(rank, world_size)
    one.gather("a")
    two.gather("b")
    one.watchdog.close()
    outcome = _outcome(two, _skip_and_reduce)
    two.watchdog.close()
    dist.destroy_process_group()
    return outcome.kind, any(t.name == "zeroshard-watchdog" for t in threading.enumerate())


def test_two_models_have_a_watchdog_each_and_closing_leaves_no_thread() -> None:
    assert run_ranks(2, _two_models) == [("DivergenceError", False)] * 2


def _in_a_barrier(rank: int, world: int) -> str:
    """Rank 0 runs something alone and rank 1 is ahead, in a barrier of the user's, in a function that we call."""
    mesh, log = build_mesh(), OperationLog()
    watchdog = Watchdog(mesh.store(), rank, world, log, patience_s=0.5, exit_grace_s=60)
    comm = Collectives(mesh.over(DATA).gather, "dp", log, watchdog)
    me = _Rank(rank, mesh, log, watchdog, comm)
    me.gather("embedding")
    try:
        if rank == 0:
            me.gather("layers.3")
    except ZeroShardError as error:
        dist.barrier()  # lets rank 1 go on
        return str(error)
    on_all_ranks(StoreBarrier(None, 0, 1, "alone", watchdog), lambda: dist.barrier(), "")
    with pytest.raises(DivergenceError) as caught:
        watchdog.raise_if_failed()
    return str(caught.value)


def test_a_rank_in_a_barrier_and_one_that_waits_for_it_are_told_so() -> None:
    texts = run_ranks(2, _in_a_barrier, timeout=100)
    assert texts[0] == texts[1]
    assert "rank 1 waits for all ranks in torch.distributed.barrier (test_watchdog.py:" in texts[0]
    assert "rank 0 waited for all-gather of unit layers.3" in texts[0]


_STUCK = """
import os, time
from datetime import timedelta
import torch.distributed as dist
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.watchdog import Watchdog

store = dist.HashStore()
log = OperationLog()
log.record("all-gather", "layers.3", 64)
stuck = Watchdog(store, 0, 2, log, patience_s=0.2, poll_s=0.1)
other = OperationLog()
other.record("all-gather", "layers.4", 64)
peer = Watchdog(store, 1, 2, other, poll_s=0.1, exit_grace_s=60)
with stuck.waiting("all-gather of unit layers.3"):
    time.sleep(60)  # as in a device synchronisation: no exception can get here
"""


def test_a_process_whose_main_thread_is_blocked_is_ended_with_the_error_printed(tmp_path: Path) -> None:
    process = start(["-c", _STUCK], tmp_path, os.environ)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE
    assert (
        "rank 0: DivergenceError: rank 0 issued all-gather of unit layers.3 as operation 1 "
        "where rank 1 issued all-gather of unit layers.4." in printed
    )


def test_a_process_ends_though_its_watchdog_was_never_closed() -> None:
    code = (
        "import torch.distributed as dist\nfrom zeroshard.comm.oplog import OperationLog\n"
        "from zeroshard.comm.watchdog import Watchdog\nWatchdog(dist.HashStore(), 0, 2, OperationLog())"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_one_rank_starts_no_thread() -> None:
    before = threading.active_count()
    watchdog = Watchdog(None, 0, 1, OperationLog())
    assert threading.active_count() == before
    with watchdog.waiting("all-gather of unit a"):
        watchdog.raise_if_failed()
    watchdog.close()
    watchdog.close()


def test_an_error_of_the_watchdog_is_a_divergence_that_callers_can_catch() -> None:
    assert issubclass(DivergenceError, RuntimeError)

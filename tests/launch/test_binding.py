"""Each rank gets cores of its own, near its GPU where that is known."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.launch.launcher import script, zeroshard
from zeroshard.errors import UsageError
from zeroshard.launch.binding import bind_ranks, divide, one_thread_per_core, parse_cores
from zeroshard.launch.job import Job


def test_no_core_is_given_twice_and_none_is_left() -> None:
    for count in range(1, 9):
        for nproc in range(1, count + 1):
            shares = divide(range(count), nproc)
            assert [core for share in shares for core in share] == list(range(count))
            assert {len(share) for share in shares} <= {count // nproc, -(-count // nproc)}
        with pytest.raises(UsageError, match=f"--bind-cores: {count + 1} ranks, but {count} cores? to divide"):
            divide(range(count), count + 1)


def test_one_thread_of_each_core_is_used(tmp_path: Path) -> None:
    for cpu in range(8):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert one_thread_per_core(tmp_path, {1, 2, 3, 4, 5, 6, 7}) == {1, 2, 3, 4}
    assert one_thread_per_core(tmp_path / "nothing", {0, 1}) == {0, 1}


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="--bind-core-list 0,4095: core 4095 is not there"):
        bind_ranks(Job("t", bind_cores=True, core_list="0,4095"), 1, {})


def test_a_list_of_cores_is_read() -> None:
    assert parse_cores("0-2, 5,7-7") == {0, 1, 2, 5, 7}
    for wrong in ("", "a", "3-1", "1-2-3", "0,0-1"):
        with pytest.raises(UsageError, match="--bind-core-list"):
            parse_cores(wrong)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_the_ranks_run_on_their_cores(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import json, os
        from pathlib import Path
        seen = [sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], "ZEROSHARD_CORES" in os.environ]
        Path(os.environ["RANK"]).write_text(json.dumps(seen))
        """,
    )
    first, second = sorted(os.sched_getaffinity(0))[:2]
    done = zeroshard(tmp_path, "run", "--nproc", "2", "--bind_core_list", f"{second},{first}", "script.py")
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [
        [[first], "1", False],
        [[second], "1", False],
    ]

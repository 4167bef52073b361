"""Each rank gets cores of its own, near its GPU where that is known."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.launcher import script, zeroshard
from zeroshard.errors import UsageError
from zeroshard.launch.binding import NumaNode, divide, format_cores, parse_cores, read_nodes

_TWO = (NumaNode(0, (0, 1, 2, 3)), NumaNode(1, (4, 5, 6, 7)))


def _shares(nproc: int, homes: Sequence[int | None] | None = None, nodes: tuple[NumaNode, ...] = _TWO) -> list[str]:
    return [
        f"{format_cores(binding.cores)}@{format_cores(binding.nodes)}"
        for binding in divide(nodes, nproc, homes or [None] * nproc)
    ]


def test_ranks_are_spread_over_the_nodes() -> None:
    assert _shares(1) == ["0-7@0-1"]
    assert _shares(2) == ["0-3@0", "4-7@1"]
    assert _shares(3) == ["0-1@0", "2-3@0", "4-7@1"]
    assert _shares(4) == ["0-1@0", "2-3@0", "4-5@1", "6-7@1"]
    assert _shares(8) == [f"{core}@{core // 4}" for core in range(8)]


def test_a_rank_is_where_its_gpu_is() -> None:
    assert _shares(2, [1, 1]) == ["4-5@1", "6-7@1"]
    assert _shares(3, [1, 0, 1]) == ["4-5@1", "0-3@0", "6-7@1"]
    assert _shares(2, [5, 5]) == ["0-3@0", "4-7@1"], "a node none of whose cores may be used"
    assert _shares(5, [1] * 5) == ["0@0", "1-2@0", "3@0", "4-5@1", "6-7@1"], "too many for the node's cores"


def test_no_core_is_given_twice_and_none_is_left() -> None:
    for nodes in (_TWO, (NumaNode(0, tuple(range(7))), NumaNode(1, (9,))), (NumaNode(0, tuple(range(5))),)):
        every = sorted(core for node in nodes for core in node.cores)
        for nproc in range(1, len(every) + 1):
            bindings = divide(nodes, nproc, [None] * nproc)
            assert sorted(core for binding in bindings for core in binding.cores) == every
            assert all(binding.cores for binding in bindings)
        with pytest.raises(UsageError, match=f"--bind-cores: {len(every) + 1} ranks, but {len(every)} cores to divide"):
            divide(nodes, len(every) + 1, [None] * (len(every) + 1))


def test_the_machine_is_read_with_one_thread_per_core(tmp_path: Path) -> None:
    for node, cores in ((0, "0-1,4-5"), (1, "2-3,6-7"), (2, "")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(f"{cores}\n")
    for cpu in range(8):
        (tmp_path / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    usable = {1, 2, 3, 4, 5, 6, 7}
    assert read_nodes(tmp_path, usable) == (NumaNode(0, (1, 4)), NumaNode(1, (2, 3)))
    assert read_nodes(tmp_path, usable, one_thread=False) == (NumaNode(0, (1, 4, 5)), NumaNode(1, (2, 3, 6, 7)))
    assert read_nodes(tmp_path / "nothing", {0, 1}) == (NumaNode(0, (0, 1)),)


def test_a_list_of_cores_is_read_and_written() -> None:
    assert parse_cores("0-2, 5,7-7") == {0, 1, 2, 5, 7}
    assert format_cores((5, 0, 1, 2, 7)) == "0-2,5,7"
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

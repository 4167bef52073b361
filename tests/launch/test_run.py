"""What a script finds when `zeroshard run` starts it."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from tests.launch.launcher import environment, script, start, zeroshard
from zeroshard.launch.resources import usable_cores

# Each rank writes what it sees into a file of its own: their output would be interleaved.
_LOOK_AROUND = """
    import json, os, sys
    from pathlib import Path
    seen = {
        "argv": sys.argv,
        "path": sys.path[0],
        "name": __name__,
        "torch": "torch" in sys.modules,
        "zeroshard": "zeroshard" in sys.modules,
        "env": {name: os.environ.get(name) for name in (
            "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "ZEROSHARD_CORES")},
    }
    Path(os.environ["OUT"], os.environ["RANK"]).write_text(json.dumps(seen))
"""


def _seen(directory: Path, ranks: int) -> list[dict]:
    return [json.loads((directory / str(rank)).read_text()) for rank in range(ranks)]


def test_a_script_gets_its_rank_its_threads_and_its_own_arguments(tmp_path: Path) -> None:
    script(tmp_path / "code", _LOOK_AROUND, "train.py")
    words = ["--nproc", "7", "-m", "--help", "--", "${local_rank}", "$$", "", "a b"]
    done = zeroshard(tmp_path, "run", "--nproc", "2", "code/train.py", *words, env={"OUT": str(tmp_path)})

    assert done.returncode == 0, done.stderr
    threads = max(1, usable_cores() // 2)
    assert f"OMP_NUM_THREADS={threads} each" in done.stderr
    for rank, seen in enumerate(_seen(tmp_path, 2)):
        assert seen["argv"] == ["code/train.py", *words]
        assert seen["name"] == "__main__"
        assert seen["path"] == str(tmp_path / "code"), "as if Python had started the script"
        assert not seen["torch"], "the script decides when torch is imported"
        assert not seen["zeroshard"]
        assert seen["env"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": str(threads),
            "ZEROSHARD_CORES": None,
        }


def test_a_module_runs_as_python_m_would_and_the_users_thread_count_stands(tmp_path: Path) -> None:
    script(tmp_path, "", "package/__init__.py")
    script(tmp_path, _LOOK_AROUND, "package/train.py")
    env = {"OUT": str(tmp_path), "OMP_NUM_THREADS": "3"}
    done = zeroshard(tmp_path, "run", "--nproc", "1", "-m", "package.train", "--lr", "1", env=env)

    assert done.returncode == 0, done.stderr
    assert "OMP_NUM_THREADS=3, as set in the environment" in done.stderr
    (seen,) = _seen(tmp_path, 1)
    assert seen["argv"] == [str(tmp_path / "package/train.py"), "--lr", "1"]
    assert seen["path"] == str(tmp_path)
    assert seen["env"]["OMP_NUM_THREADS"] == "3"


def test_several_nodes_make_one_job(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    name = script(tmp_path, _LOOK_AROUND)
    nodes = ["run", "--nproc", "1", "--nnodes", "2", "--master-addr", "localhost", "--master-port", str(port)]
    env = {"OUT": str(tmp_path)}
    first = start(tmp_path, *nodes, "--node-rank", "0", name, stderr=subprocess.PIPE, env=env)
    second = zeroshard(tmp_path, *nodes, "--node-rank", "1", name, env=env)

    assert second.returncode == 0, second.stderr
    assert first.wait(timeout=60) == 0
    assert [(seen["env"]["RANK"], seen["env"]["WORLD_SIZE"]) for seen in _seen(tmp_path, 2)] == [("0", "2"), ("1", "2")]


def test_a_node_that_waits_for_the_others_in_vain_says_so(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    words = ["--nproc", "1", "--nnodes", "2", "--node-rank", "0", "--master-addr", "localhost", "--master-port", port]
    done = zeroshard(tmp_path, "run", *words, "--rendezvous-timeout", "1", script(tmp_path, ""))
    assert done.returncode == 2, done.stderr
    assert f"zeroshard: the nodes did not meet at localhost:{port}: " in done.stderr
    assert "killed" not in done.stderr


def test_a_script_may_start_processes_of_its_own(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import multiprocessing

        def double(number):
            return 2 * number

        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    assert pool.map(double, [1, 2]) == [2, 4]
        """,
    )
    done = zeroshard(tmp_path, "run", "--nproc", "1", name)
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), done.stderr


def test_a_program_runs_by_itself_with_a_file_for_each_rank(tmp_path: Path) -> None:
    program = "echo out $RANK; echo err $RANK >&2; sleep $RANK; exit $((RANK * 3))"
    words = ["--num_gpus", "2", "--log-dir", "logs", "--console", "first", "--no_python", "sh", "-c", program]
    done = zeroshard(tmp_path, "run", *words, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 3
    assert done.stdout == "rank 0: out 0\n"
    opening, shown, *said = done.stderr.splitlines()
    assert "2 ranks on this node" in opening
    assert shown == "rank 0: err 0"
    assert "failed first: sh: exit code 3" in said[0]
    assert len(said) == 1
    for rank in range(2):
        assert (tmp_path / f"logs/rank_{rank}.out").read_text() == f"out {rank}\n"
        assert (tmp_path / f"logs/rank_{rank}.err").read_text() == f"err {rank}\n"


def test_lines_of_several_ranks_come_whole(tmp_path: Path) -> None:
    text = """
        import time
        class Late:
            def __str__(self):
                time.sleep(0.5)  # so that both ranks are amid their line
                return "words"
        print("a line of", Late())
    """
    done = zeroshard(tmp_path, "run", "--nproc", "2", script(tmp_path, text))
    assert done.stdout.splitlines() == ["a line of words"] * 2, done.stderr


def test_chosen_slots_of_this_host_are_the_gpus_that_its_ranks_see(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=4\n")
    name = script(tmp_path, "import os; print(os.environ['WORLD_SIZE'], os.environ['CUDA_VISIBLE_DEVICES'])")
    words = ["--hostfile", "hosts", "--include", "localhost:1,3"]
    done = zeroshard(tmp_path, "run", *words, name, env={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert (done.returncode, done.stdout) == (0, "2 5,7\n" * 2), done.stderr


def test_a_launcher_without_standard_streams_runs_its_ranks(tmp_path: Path) -> None:
    text = """
        import os
        from pathlib import Path
        print("into nothing", flush=True)
        Path(os.environ["RANK"]).write_text(os.readlink("/proc/self/fd/1"))
    """
    name = script(tmp_path, text)
    words = shlex.join([sys.executable, "-m", "zeroshard", "run", "--nproc", "2", name])
    done = subprocess.run(
        ["sh", "-c", f"{words} <&- >&- 2>&-"], cwd=tmp_path, env=environment(), timeout=60, check=False
    )
    assert done.returncode == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["/dev/null"] * 2

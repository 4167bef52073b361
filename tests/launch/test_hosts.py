"""A job on several hosts: what its ranks find, and that all of it ends, everywhere, with the cause told first.

The hosts are network namespaces with an sshd each (hosts.py). What needs more than a few seconds runs with
ZEROSHARD_LAUNCH_TESTS=1.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.hosts import PORT, TestHosts, make_hosts, why_not
from tests.launch.launcher import script

_REASON = why_not()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=f"test hosts: {_REASON}")
extensive = pytest.mark.skipif(
    "ZEROSHARD_LAUNCH_TESTS" not in os.environ, reason="set ZEROSHARD_LAUNCH_TESTS=1 for all launches over hosts"
)

# Says that it runs, with a child of its own as a data loader would be; each rank's loss of a peer shows as an error.
_LONG = """
    import os, socket, subprocess, time
    rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], 4000)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if rank == 0:
        listener = socket.create_server(("", 4000))
        print("rank 0 runs", flush=True)
        peer, _ = listener.accept()
    else:
        while True:
            try:
                peer = socket.create_connection(address)
                break
            except OSError:
                time.sleep(0.05)
        print(f"rank {rank} runs", flush=True)
    peer.recv(1)
    raise ConnectionError("lost a peer")
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with make_hosts(tmp_path_factory.mktemp("keys")) as made:
        yield made


def _running(hosts: TestHosts, directory: Path, *words: str) -> subprocess.Popen[str]:
    """A job of two ranks on two hosts that has got to where it waits for ever."""
    script(directory, _LONG)
    job = hosts.start(directory, "run", "--hostfile", hosts.hostfile(directory), *hosts.ssh, *words, "script.py")
    assert job.stdout is not None
    said = {job.stdout.readline().split(": ")[-1] for _ in range(2)}
    assert said == {"rank 0 runs\n", "rank 1 runs\n"}, job.communicate()[1]
    return job


def _words(job: subprocess.Popen[str]) -> list[str]:
    """What the launcher and its nodes said of the job, without what they say when they start."""
    _, err = job.communicate(timeout=120)
    said = [line for line in err.splitlines() if "zeroshard: " in line]
    return [line for line in said if " on this node" not in line and not re.match(r"zeroshard: \d+ ranks? on ", line)]


def test_a_job_runs_on_all_hosts_with_the_launchers_environment(hosts: TestHosts, tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import os, sys
        from pathlib import Path
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "NCCL_X", "HF_T",
                 "SECRET", "CUDA_VISIBLE_DEVICES")
        print(*(os.environ.get(name) for name in names), sys.argv[1:], sys.stdin.read() == "")
        Path(os.environ["RANK"]).write_text(Path("/proc/self/net/fib_trie").read_text())
        """,
    )
    (tmp_path / ".deepspeed_env").write_text("# for all nodes\nHF_T=hidden word\n")
    words = ["--include", f"{hosts.names[0]}:1@{hosts.names[1]}", "--log-dir", "logs", "script.py", "a b", "$x"]
    status, out, said = hosts.run(
        tmp_path, "run", "--hostfile", hosts.hostfile(tmp_path, 2), *hosts.ssh, *words, NCCL_X="1 2", SECRET="s"
    )
    assert status == 0, said
    assert sorted(out.splitlines()) == [
        f"{hosts.names[0]}: rank 0: 0 0 3 1 0 {hosts.names[0]} 1 2 hidden word None 1 ['a b', '$x'] True",
        f"{hosts.names[1]}: rank 1: 1 0 3 2 1 {hosts.names[0]} 1 2 hidden word None None ['a b', '$x'] True",
        f"{hosts.names[1]}: rank 2: 2 1 3 2 1 {hosts.names[0]} 1 2 hidden word None None ['a b', '$x'] True",
    ]
    assert (tmp_path / "logs/rank_2.out").read_text().startswith("2 1 3 2")
    for rank, name in enumerate([hosts.names[0], hosts.names[1], hosts.names[1]]):
        assert name in (tmp_path / str(rank)).read_text(), "it ran on another host"
    assert hosts.left_running() == {}


def test_a_killed_rank_is_named_first_and_nothing_is_left_on_any_host(hosts: TestHosts, tmp_path: Path) -> None:
    job = _running(hosts, tmp_path)
    os.kill(hosts.find(hosts.names[1], "runner.py"), signal.SIGKILL)
    said = _words(job)
    assert job.returncode == 128 + 9
    name = hosts.names[1]
    assert re.match(
        rf"{name}: zeroshard: rank 1 \(local rank 0, host {name}, pid \d+\) failed first: killed by", said[0]
    )
    assert sum("failed first" in line for line in said) == 1
    assert hosts.left_running() == {}


def test_a_launcher_that_is_killed_takes_all_hosts_along(hosts: TestHosts, tmp_path: Path) -> None:
    job = _running(hosts, tmp_path)
    job.kill()
    job.communicate(timeout=120)
    assert hosts.left_running(15) == {}


@extensive
def test_a_host_that_takes_long_to_answer_gets_its_job(hosts: TestHosts, tmp_path: Path) -> None:
    slow = tmp_path / "bin" / "ssh"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\nsleep 12\nexec {shutil.which("ssh")} "$@"\n')  # longer than two beats
    slow.chmod(0o755)
    script(tmp_path, "print('ran')")
    words = ["run", "--hostfile", hosts.hostfile(tmp_path), *hosts.ssh, "script.py"]
    status, out, said = hosts.run(tmp_path, *words, PATH=f"{slow.parent}:{os.environ['PATH']}")
    assert (status, out.count("ran")) == (0, 2), said


@extensive
def test_an_exception_is_told_first_with_its_traceback(hosts: TestHosts, tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("planted " + "x" * 20000)
        time.sleep(100)
        """,
    )
    status, _, said = hosts.run(tmp_path, "run", "-H", hosts.hostfile(tmp_path), *hosts.ssh, "script.py")
    assert status == 1
    place = next(number for number, line in enumerate(said) if "failed first" in line)
    assert said[place].endswith("failed first: ValueError: planted " + "x" * 20000)
    assert f"{hosts.names[1]}: Traceback (most recent call last):" in said[place + 1 :]
    assert said[-1] == "zeroshard: all hosts ended"
    assert hosts.left_running() == {}


@extensive
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("victim", "cause"),
    [
        # The guard has the module on its command line, and its child, the agent, is a fork of it.
        ("agent", "the agent on it was killed by SIGKILL"),
        ("guard", "(its agent got SIGTERM|the connection to it ended)"),
        ("sshd", "the connection to it ended"),
        ("everything", "(the connection to it ended|its agent got SIGTERM|the agent on it was killed)"),
    ],
)
def test_a_killed_host_is_named_first(hosts: TestHosts, tmp_path: Path, place: int, victim: str, cause: str) -> None:
    job = _running(hosts, tmp_path)
    name = hosts.names[place]
    processes = hosts.processes(name)
    guard, agent = sorted(pid for pid, words in processes.items() if "zeroshard.launch.node" in words)[-2:]
    session = [pid for pid, words in processes.items() if words.startswith("sshd: root")]
    victims = {"agent": [agent], "guard": [guard], "sshd": session, "everything": list(processes)}[victim]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            assert victim == "everything"
    said = _words(job)
    assert job.returncode
    assert re.search(rf"zeroshard: (host|node \d \(host) {name}\)? was lost first: {cause}", said[0]), said
    assert hosts.left_running(15) == {}


@extensive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_stop_signal_ends_all_hosts(hosts: TestHosts, tmp_path: Path, number: signal.Signals) -> None:
    job = _running(hosts, tmp_path)
    job.send_signal(number)
    assert _words(job) == [f"zeroshard: {number.name} received, all hosts ended"]
    assert job.returncode == 128 + number
    assert hosts.left_running() == {}


_SAVES = """
    import os, signal, socket, sys, time
    rank, asked = int(os.environ["RANK"]), []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    pid, directory = os.environ["ZEROSHARD_RANK_FILES"].split(":")
    open(f"{directory}/{pid}.saves", "w").close()
    print(f"rank {rank} runs", flush=True)
    while not asked:
        time.sleep(0.02)
    # Longer than a launcher waits for ranks that do not save.
    time.sleep(17 * rank)
    sys.exit(int(os.environ.get("ZEROSHARD_TEST_STATUS", "75")) if rank else 75)
"""


def _saving(hosts: TestHosts, directory: Path, **environment: str) -> subprocess.Popen[str]:
    script(directory, _SAVES)
    words = ["run", "--hostfile", hosts.hostfile(directory), *hosts.ssh, "script.py"]
    job = hosts.start(directory, *words, **environment)
    assert job.stdout is not None
    said = {job.stdout.readline().split(": ")[-1] for _ in range(2)}
    assert said == {"rank 0 runs\n", "rank 1 runs\n"}, job.communicate()[1]
    return job


@extensive
def test_hosts_whose_ranks_save_at_sigterm_are_waited_for_and_have_not_failed(hosts: TestHosts, tmp_path: Path) -> None:
    job = _saving(hosts, tmp_path)
    job.send_signal(signal.SIGTERM)
    said = _words(job)
    assert job.returncode == 75, said
    assert said == [
        "zeroshard: SIGTERM received: the ranks finish their step, save and end; a second one ends them at once",
        "zeroshard: the ranks were told to stop and have saved; status 75",
    ]
    assert hosts.left_running() == {}


@extensive
def test_a_second_sigterm_ends_hosts_whose_ranks_save(hosts: TestHosts, tmp_path: Path) -> None:
    job = _saving(hosts, tmp_path)
    job.send_signal(signal.SIGTERM)
    assert job.stderr is not None
    while "save and end" not in job.stderr.readline():
        pass
    job.send_signal(signal.SIGTERM)
    assert _words(job) == ["zeroshard: SIGTERM received, all hosts ended"]
    assert job.returncode == 128 + signal.SIGTERM
    assert hosts.left_running() == {}


@extensive
def test_a_host_that_could_not_save_has_failed(hosts: TestHosts, tmp_path: Path) -> None:
    job = _saving(hosts, tmp_path, ZEROSHARD_TEST_STATUS="3")
    job.send_signal(signal.SIGTERM)
    said = _words(job)
    assert job.returncode != 75, said
    assert hosts.left_running() == {}


@extensive
def test_a_second_ctrl_c_ends_ranks_that_ignore_the_first(hosts: TestHosts, tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import signal, time
        signal.signal(signal.SIGINT, lambda number, frame: print("ignored", flush=True))
        print("runs", flush=True)
        while True:
            time.sleep(1)
        """,
    )
    job = hosts.start(tmp_path, "run", "--hostfile", hosts.hostfile(tmp_path), *hosts.ssh, "script.py")
    assert job.stdout is not None
    for word in ("runs", "ignored"):
        assert [job.stdout.readline().split(": ")[1] for _ in range(2)] == [f"{word}\n"] * 2
        job.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert _words(job) == ["zeroshard: SIGINT received, all hosts ended"]
    assert time.monotonic() - begun < 9, "it waited for ranks that had been told twice"
    assert hosts.left_running() == {}


def test_hosts_that_can_not_be_reached_are_one_error(hosts: TestHosts, tmp_path: Path) -> None:
    script(tmp_path, "print('started')")
    file = hosts.hostfile(tmp_path, extra="10.77.0.1 slots=1\n10.77.0.99 slots=1 # nobody\n")
    status, out, said = hosts.run(tmp_path, "run", "--hostfile", file, *hosts.ssh, "script.py")
    assert (status, out) == (2, "")
    assert said[1] == "zeroshard: 2 hosts can't be used:"
    assert said[2].startswith("  host 10.77.0.1 (hostfile line 3) can't be used: ssh: connect to host 10.77.0.1 port")
    assert said[3].startswith("  host 10.77.0.99 (hostfile line 4) can't be used: ssh: connect to host 10.77.0.99 port")
    assert len(said) == 4
    assert hosts.left_running() == {}


@extensive
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
@pytest.mark.parametrize("victim", ["rank", "mpirun"])
def test_mpirun_starts_and_ends_the_nodes(hosts: TestHosts, tmp_path: Path, victim: str) -> None:
    script(tmp_path, _LONG)
    ssh = f"-p {PORT} " + hosts.ssh[-1]
    arguments = f"--allow-run-as-root --mca plm_rsh_args '{ssh}' --mca oob_tcp_if_include 10.77.0.0/24"
    words = ["--launcher", "openmpi", "--launcher-args", arguments, "--master-port", "29533", "script.py"]
    job = hosts.start(tmp_path, "run", "--hostfile", hosts.hostfile(tmp_path), *words)
    assert job.stdout is not None
    assert {job.stdout.readline(), job.stdout.readline()} == {"rank 0 runs\n", "rank 1 runs\n"}
    if victim == "mpirun":
        job.kill()
    else:
        os.kill(hosts.find(hosts.names[1], "runner.py"), signal.SIGKILL)
    _, err = job.communicate(timeout=120)
    assert job.returncode
    said = [line for line in err.splitlines() if line.startswith("zeroshard:") and "on this node" not in line]
    assert victim == "mpirun" or re.match(r"zeroshard: rank 1 .*failed first: killed", said[0]), err
    assert hosts.left_running(15) == {}


@extensive
def test_a_busy_port_of_the_first_host_is_one_error(hosts: TestHosts, tmp_path: Path) -> None:
    script(tmp_path, "print('started')")
    holder = "import socket, time; s = socket.create_server(('', 29555)); print(1, flush=True); time.sleep(100)"
    command = ["nsenter", f"--net=/run/netns/{hosts.namespace(hosts.names[0])}", "python3", "-c", holder]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as taken:
        assert taken.stdout is not None
        taken.stdout.readline()
        words = ["--hostfile", hosts.hostfile(tmp_path), "--master_port", "29555", *hosts.ssh, "script.py"]
        status, out, said = hosts.run(tmp_path, "run", *words)
        taken.kill()
    assert (status, out) == (2, "")
    assert [line for line in said if "can't listen" in line or line.startswith("zeroshard: all")] == [
        f"{hosts.names[0]}: zeroshard: --master-port 29555: this node can't listen on it "
        "(Address already in use); choose another, or on a single node leave it out",
        "zeroshard: all hosts ended",
    ]
    assert hosts.left_running() == {}


def _by_hand(hosts: TestHosts, directory: Path) -> list[subprocess.Popen[str]]:
    """The same job with the command run on each host, as a script or a pod would."""
    script(directory, _LONG)
    file = hosts.hostfile(directory)
    words = ["run", "--no_ssh", "--hostfile", file, "--master_addr", hosts.names[0], "--node_rank"]
    nodes = [
        hosts.start(directory, *words, str(rank), "script.py", where=name) for rank, name in enumerate(hosts.names)
    ]
    for rank, node in enumerate(nodes):
        assert node.stdout is not None
        assert node.stdout.readline() == f"rank {rank} runs\n"
    return nodes


@extensive
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("victim", ["rank", "agent", "guard", "term"])
def test_nodes_without_a_launcher_end_together(hosts: TestHosts, tmp_path: Path, place: int, victim: str) -> None:
    nodes = _by_hand(hosts, tmp_path)
    name = hosts.names[place]
    guard, agent = sorted(pid for pid, words in hosts.processes(name).items() if "-m zeroshard run" in words)
    pid = {"rank": hosts.find(name, "runner.py"), "agent": agent, "guard": guard, "term": guard}[victim]
    os.kill(pid, signal.SIGTERM if victim == "term" else signal.SIGKILL)
    said = [_words(node) for node in nodes]
    other = said[1 - place]
    if victim == "rank":
        for lines in said:
            assert re.match(rf"zeroshard: rank {place} \(local rank 0, host {name}, .*failed first: killed", lines[0])
    else:
        assert re.match(rf"zeroshard: node {place} \(host {name}\) was lost first: (its agent|it fell)", other[0]), said
    assert all(node.returncode for node in nodes)
    assert hosts.left_running() == {}


@extensive
def test_a_host_that_falls_silent_is_lost_and_ends_by_itself(hosts: TestHosts, tmp_path: Path) -> None:
    job = _running(hosts, tmp_path)
    with hosts.unplugged(hosts.names[1]):
        said = _words(job)
        assert re.search(rf"(host|node 1 \(host) {hosts.names[1]}\)? was lost first", said[0]), said
        # sshd keeps the session of a peer that does not answer until TCP gives up; what it had started has ended.
        deadline = time.monotonic() + 90
        while any("sshd" not in words for words in hosts.processes(hosts.names[1]).values()):
            assert time.monotonic() < deadline, hosts.processes(hosts.names[1])
            time.sleep(0.2)


@extensive
def test_nodes_without_a_launcher_notice_a_silent_one(hosts: TestHosts, tmp_path: Path) -> None:
    first, second = _by_hand(hosts, tmp_path)
    with hosts.unplugged(hosts.names[1]):
        assert re.match(rf"zeroshard: node 1 \(host {hosts.names[1]}\) was lost first", _words(first)[0])
        assert re.match(rf"zeroshard: node 0 \(host {hosts.names[0]}\) was lost first", _words(second)[0])
        assert hosts.left_running() == {}

"""A Slurm cluster in a directory: munged, slurmctld, and a slurmd for each of its nodes, all on this host.

    with make_cluster(directory, count=3) as cluster:
        job = cluster.submit("job.sbatch")

Each node has its own port, as Slurm's "multiple slurmd" setup describes it. Nothing outside of the directory is
touched, and no daemon of the system is used. Every node pretends to have GPUs, for jobs that ask for some.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.launch.launcher import environment

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"

_CONFIG = """
ClusterName=zeroshard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
MinJobAge=600
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
ProctrackType=proctrack/linuxproc
MpiDefault=none
SwitchType=switch/none
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
SlurmdParameters=config_overrides
KillWait=30
BatchStartTimeout=30
NodeName=node[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{end} CPUs=2 Gres=gpu:8
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why no cluster can be made here; None if one can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"needs {', '.join(missing)} (Debian: slurm-wlm munge)" if missing else None


class Cluster:
    """The running cluster; `names` are its nodes."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory, self.names = directory, [f"node{number}" for number in range(count)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=cwd or self.directory, env=self._environment(env), check=False
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def submit(self, directory: Path, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a batch job from its directory; returns its number."""
        return self.command("sbatch", "--parsable", *words, cwd=directory, env=env).strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ExitCode, ..."""
        words = self.command("scontrol", "--oneliner", "show", "job", number).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def until(self, number: str, what: Callable[[dict[str, str]], bool], seconds: float) -> dict[str, str]:
        """Wait for a job to be so."""
        end = time.monotonic() + seconds
        while not what(job := self.job(number)):
            assert time.monotonic() < end, job
            time.sleep(0.2)
        return job

    def processes(self, node: str, number: str) -> dict[int, str]:
        """The processes of a job's step on a node, slurmstepd not included, and their command lines."""
        wanted = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_JOB_ID={number}".encode()}
        found: dict[int, str] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = set((path / "environ").read_bytes().split(b"\0"))
                if wanted <= variables and any(word.startswith(b"SLURM_PROCID=") for word in variables):
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def power_off(self, node: str, number: str) -> None:
        """A node of a job is gone: its daemon, its step daemons and their processes, all at once."""
        doomed = [self._daemons[node].pid, *self.processes(node, number)]
        for pid in list(self.processes(node, number)):
            parent = _parent(pid)
            while parent > 1 and "slurmstepd" not in _command_line(parent):
                parent = _parent(parent)
            doomed += [parent] if parent > 1 else []
        assert len(doomed) > 2, (node, number)
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons.pop(node).wait()

    def start(self, node: str) -> None:
        """Start a node's daemon."""
        self._start(node, "slurmd", "-D", "-N", node)

    def _environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: value for name, value in environment(env).items() if not name.startswith("SLURM")}
        return {**kept, "PATH": kept["PATH"] + ":/usr/sbin:/sbin", "SLURM_CONF": str(self.directory / "slurm.conf")}

    def _start(self, name: str, *words: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory, env=self._environment()
            )

    def _begin(self) -> None:
        self._start("munged", "munged", "--foreground", "--force", *_munge_options(self.directory))
        _await(lambda: (self.directory / "munge.socket").exists(), "munged")
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for node in self.names:
            self.start(node)
        self.until_idle()

    def until_idle(self) -> None:
        """Wait until all nodes are there and run nothing."""
        _await(lambda: self._idle() == len(self.names), "a node")

    def _idle(self) -> int:
        done = subprocess.run(
            ["sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D"],
            capture_output=True,
            text=True,
            env=self._environment(),
            check=False,
        )
        return int(done.stdout.split()[0]) if done.stdout.split() else 0

    def _end(self) -> None:
        with suppress(AssertionError, OSError):
            if "slurmctld" in self._daemons:
                self.command("scancel", "--signal=KILL", "--full", "--user=root")
                self.command("scancel", "--user=root")
                _await(lambda: not self.command("squeue", "-h").strip(), "the end of all jobs")
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        for pid, words in _all_processes().items():
            if "slurmstepd" in words and f"{self.directory}/" in _variables(pid):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def make_cluster(directory: Path, count: int) -> Iterator[Cluster]:
    """A cluster with so many idle nodes; all is gone afterwards."""
    _write_config(directory, count)
    cluster = Cluster(directory, count)
    with ExitStack() as stack:
        stack.callback(cluster._end)
        cluster._begin()
        yield cluster


def _write_config(directory: Path, count: int) -> None:
    ports = _free_ports(count + 1)
    text = _CONFIG.format(
        host=socket.gethostname(), directory=directory, port=ports, first=ports + 1, end=ports + count, last=count - 1
    )
    (directory / "slurm.conf").write_text(text)
    # Slurm wants a device for each GPU; nobody opens these.
    (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-7]\n")
    for gpu in range(8):
        os.mknod(directory / f"gpu{gpu}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    (directory / "state").mkdir()
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(26000, 30000, count):
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return first
    raise AssertionError("no free ports")


def _munge_options(directory: Path) -> list[str]:
    places = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    return [f"--{option}={directory}/{name}" for option, name in places.items()] + [f"--log-file={directory}/munge.log"]


def _await(what: Callable[[], bool], name: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"{name} did not get ready"
        time.sleep(0.1)


def _all_processes() -> dict[int, str]:
    return {int(path.name): _command_line(int(path.name)) for path in Path("/proc").glob("[0-9]*")}


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _variables(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0

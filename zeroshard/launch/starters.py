"""The commands that start the nodes of a job on other hosts.

    ssh       one ssh per host, whose input the launcher holds
    pdsh      the same as ssh, under the name that DeepSpeed's scripts use
    openmpi   one mpirun, with a process per host
    slurm     one srun, with a task per node

With ssh the launcher sends each node its job and watches it (remote.py). mpirun and srun start and end processes
themselves: a node finds its place in the environment (`--rendezvous`), and they end all nodes when one fails. The
commands contain names of variables, but no values.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from zeroshard.errors import UsageError
from zeroshard.launch.hosts import Host


class Launcher(str, Enum):
    """What starts the nodes."""

    SSH = "ssh"
    PDSH = "pdsh"
    OPENMPI = "openmpi"
    SLURM = "slurm"


@dataclass(frozen=True)
class StarterOptions:
    """How to reach the hosts: the port of their sshd, and further arguments of ssh, mpirun or srun."""

    port: int | None = None
    arguments: tuple[str, ...] = ()


_PROGRAM = {Launcher.SSH: "ssh", Launcher.OPENMPI: "mpirun", Launcher.SLURM: "srun"}
_PACKAGE = {
    Launcher.SSH: "install an ssh client (openssh-client)",
    Launcher.OPENMPI: "install Open MPI, or load its module",
    Launcher.SLURM: "run on a machine of a Slurm cluster",
}

# Reads variables from the first line of input, then becomes the node: they are set before that interpreter starts.
_BOOTSTRAP = (
    "import json,os,sys\n"
    "line=b''\n"
    "while not line.endswith(b'\\n'):\n"
    " byte=os.read(0,1)\n"
    " if not byte: sys.exit(1)\n"
    " line+=byte\n"
    "os.environ.update(json.loads(line))\n"
    "os.execv(sys.executable,[sys.executable,'-u','-m','zeroshard.launch.node'])\n"
)


def require(launcher: Launcher) -> str:
    """The path of the launcher's program. Raises UsageError if it is not installed."""
    path = shutil.which(_PROGRAM[launcher])
    if path is None:
        raise UsageError(f"--launcher {launcher.value}: there is no {_PROGRAM[launcher]} here; {_PACKAGE[launcher]}")
    return path


def node_command(directory: Path) -> str:
    """The command for the shell of a host; it runs in the same directory and with the same Python as this process."""
    return f"cd {shlex.quote(str(directory))} && exec {shlex.join([sys.executable, '-c', _BOOTSTRAP])}"


def ssh_command(host: str, starter: StarterOptions, directory: Path) -> list[str]:
    """The ssh to a host: without prompts, with an end after 30 s without answers, and with its own connection."""
    options = ["BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10", "ServerAliveCountMax=3"]
    options += ["ControlMaster=no", "ControlPath=none", "ForwardX11=no", "LogLevel=ERROR"]
    words = [require(Launcher.SSH), "-T", *(word for option in options for word in ("-o", option))]
    if starter.port is not None:
        words += ["-p", str(starter.port)]
    return [*words, *starter.arguments, "--", host, node_command(directory)]


def openmpi_command(
    hosts: Sequence[Host], starter: StarterOptions, exports: Sequence[str], node: Sequence[str]
) -> list[str]:
    """One mpirun with a process on each host; `exports` are names of variables, `node` is what each process runs."""
    names = ",".join(f"{host.name}:1" for host in hosts)
    words = [require(Launcher.OPENMPI), "-n", str(len(hosts)), "--host", names, "--map-by", "ppr:1:node"]
    # mpirun would bind a process to one core, and with it all ranks of the node.
    words += ["--bind-to", "none"]
    if starter.port is not None:
        words += ["--mca", "plm_rsh_args", f"-p {starter.port}"]
    for name in exports:
        words += ["-x", name]
    return [*words, *starter.arguments, *node]


def slurm_command(
    nnodes: int | None, starter: StarterOptions, exports: Sequence[str], node: Sequence[str]
) -> list[str]:
    """One srun with a task on each of `nnodes` nodes of the allocation, by default on all."""
    words = [require(Launcher.SLURM), "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpu-bind=none"]
    if nnodes is not None:
        words += [f"--nodes={nnodes}", f"--ntasks={nnodes}"]
    words.append("--export=" + ",".join(["ALL", *exports]))
    return [*words, *starter.arguments, *node]

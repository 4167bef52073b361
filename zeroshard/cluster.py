"""What the environment says of this process's place: as a rank, for `init_distributed`, or as a node, for the launcher.

    torchrun      RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT          ranks
    Open MPI      OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK              ranks, or one process per node
    MPICH, Intel  PMI_RANK PMI_SIZE, MPI_LOCALRANKID                          ranks
    Slurm         SLURM_PROCID SLURM_NTASKS SLURM_LOCALID, node list          ranks, or one task per node
    Kubernetes    PET_*, or JOB_COMPLETION_INDEX NNODES MASTER_ADDR           nodes

Only variables are read: asking mpi4py or scontrol was rejected, since either may be absent or slow, and a half-set
environment must end in a sentence and not in a wait.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zeroshard.errors import UsageError

DEFAULT_PORT = 29500
Environment = Mapping[str, str]


@dataclass(frozen=True)
class RankPlace:
    """This process among all ranks; `source` says which variables told it."""

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class NodePlace:
    """This node among all nodes; what the environment leaves open is None."""

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    nproc: str | None = None


@dataclass(frozen=True)
class _Scheme:
    """The names under which a starter of ranks says who is who."""

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_TORCHRUN = _Scheme("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SCHEMES = (
    _TORCHRUN,
    _Scheme(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Scheme(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Scheme("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# srun sets the step's; a batch script sees the job's, which say nothing of how many processes it starts.
_SLURM = _Scheme("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def rank_place(environ: Environment, default_port: int = DEFAULT_PORT) -> RankPlace | None:
    """The place that a launcher gave this process; None if no launcher has.

    Raises UsageError for an environment of which a part is missing or makes no sense.
    """
    for scheme in _SCHEMES:
        present = [name for name in (scheme.rank, scheme.size, scheme.local_rank) if name in environ]
        if present:
            return _place(scheme, environ, present, default_port)
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return _place(_SLURM, environ, ["SLURM_PROCID"], default_port)
    return None


def _place(scheme: _Scheme, environ: Environment, present: list[str], default_port: int) -> RankPlace:
    missing = [name for name in (scheme.rank, scheme.size) if name not in environ]
    if missing:
        raise UsageError(
            f"the environment sets {' and '.join(present)} but not {' and '.join(missing)}: start the script with "
            f"`zeroshard run`, or set all of them, or none to run as a single process"
        )
    rank, size = number(environ, scheme.rank), number(environ, scheme.size)
    if not 0 <= rank < size:
        raise UsageError(f"{scheme.rank}={rank} with {scheme.size}={size}: ranks are from 0 to {size - 1}")
    local_size = _local_size(scheme, environ)
    address = environ.get("MASTER_ADDR") or _master(scheme, environ, size, local_size)
    port = port_of(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else _port(scheme, environ, default_port)
    return RankPlace(scheme.source, rank, size, _local_rank(scheme, environ, size, rank), local_size, address, port)


def _local_rank(scheme: _Scheme, environ: Environment, size: int, rank: int) -> int:
    if scheme.local_rank in environ:
        return number(environ, scheme.local_rank)
    if size == 1:
        return 0
    raise UsageError(
        f"the environment sets {scheme.rank} but not {scheme.local_rank}, which says which GPU is rank {rank}'s"
    )


def _local_size(scheme: _Scheme, environ: Environment) -> int | None:
    text = environ.get(scheme.local_size, "")
    if scheme is not _SLURM:
        return number(environ, scheme.local_size) if text else None
    counts = _task_counts(text)
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _task_counts(text: str) -> list[int]:
    """Slurm's tasks per node: '2(x3),1' is 2, 2, 2, 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _master(scheme: _Scheme, environ: Environment, size: int, local_size: int | None) -> str:
    if scheme is _SLURM:
        return slurm_hosts(environ)[0]
    if size in (1, local_size):
        return "127.0.0.1"
    hint = {
        "torchrun": "start the script with `zeroshard run`, or set MASTER_ADDR to the host of rank 0",
        "Open MPI": "pass the host of rank 0 to mpirun as -x MASTER_ADDR=HOST",
    }
    raise UsageError(
        f"the environment of {scheme.source} says rank and world size {size}, but not where rank 0 is: "
        + hint.get(scheme.source, "export MASTER_ADDR, the host of rank 0")
    )


def _port(scheme: _Scheme, environ: Environment, default: int) -> int:
    """All ranks must come to the same one without asking: from the Slurm job's number, which no other job has."""
    if scheme is _SLURM and default == DEFAULT_PORT:
        return slurm_port(environ)
    return default


def slurm_port(environ: Environment) -> int:
    """A port below those that the kernel hands out by itself, by the number of job and step."""
    job = number(environ, "SLURM_JOB_ID")
    step = environ.get("SLURM_STEP_ID", "0")
    return 15000 + (job * 7 + (int(step) if step.isdecimal() else 0)) % 15000


def slurm_hosts(environ: Environment) -> list[str]:
    """The hosts of the step, or of the job, in Slurm's order."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return expand_hosts(environ[name])
    raise UsageError("Slurm's environment has no SLURM_JOB_NODELIST: run inside srun, sbatch or salloc")


def expand_hosts(text: str) -> list[str]:
    """Slurm's short form of host names: 'a[01-03,7]-x,b' is a01-x, a02-x, a03-x, a7-x, b."""
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        expanded = [""]
        for plain, numbers in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", word):
            tails = [plain] if plain else _numbers(numbers, text)
            expanded = [head + tail for head in expanded for tail in tails]
        hosts += expanded
    return hosts


def _numbers(numbers: str, text: str) -> list[str]:
    found: list[str] = []
    for part in numbers.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"the node list {text!r} is not of the form that Slurm writes")
        found += [str(value).zfill(len(first)) for value in range(int(first), int(last or first) + 1)]
    return found


def slurm_node(environ: Environment) -> NodePlace:
    """This node in a Slurm step of one task per node."""
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
        raise UsageError("--rendezvous slurm: this is no Slurm step; start it with srun --ntasks-per-node=1")
    tasks, hosts = number(environ, "SLURM_STEP_NUM_TASKS"), slurm_hosts(environ)
    if tasks != len(hosts):
        raise UsageError(
            f"--rendezvous slurm: {tasks} tasks on {len(hosts)} nodes; zeroshard starts the ranks of a node itself: "
            "use srun --ntasks-per-node=1"
        )
    return NodePlace(tasks, number(environ, "SLURM_PROCID"), hosts[0], slurm_port(environ))


def openmpi_node(environ: Environment) -> NodePlace:
    """This node in an mpirun of one process per node."""
    if "OMPI_COMM_WORLD_SIZE" not in environ or "OMPI_COMM_WORLD_RANK" not in environ:
        raise UsageError("--rendezvous openmpi: not started by Open MPI's mpirun")
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") != "1":
        raise UsageError(
            f"--rendezvous openmpi: {environ['OMPI_COMM_WORLD_LOCAL_SIZE']} processes on this node; zeroshard starts "
            "the ranks of a node itself: use mpirun --map-by ppr:1:node"
        )
    size = number(environ, "OMPI_COMM_WORLD_SIZE")
    address = environ.get("MASTER_ADDR")
    port = port_of(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None
    return NodePlace(size, number(environ, "OMPI_COMM_WORLD_RANK"), address, port)


def torchrun_node(environ: Environment) -> NodePlace:
    """What torchrun's own variables say (PET_NNODES and so on); operators for Kubernetes set them."""
    nnodes = environ.get("PET_NNODES")
    if nnodes is not None and len(set(nnodes.split(":"))) > 1:
        nnodes = None  # an elastic job, which needs no number
    rank = environ.get("PET_NODE_RANK")
    return NodePlace(
        nnodes=_whole("PET_NNODES", nnodes.partition(":")[0]) if nnodes else None,
        node_rank=_whole("PET_NODE_RANK", rank) if rank else None,
        master_addr=environ.get("PET_MASTER_ADDR"),
        master_port=port_of(environ, "PET_MASTER_PORT") if environ.get("PET_MASTER_PORT") else None,
        nproc=environ.get("PET_NPROC_PER_NODE"),
    )


def kubernetes_node(environ: Environment) -> NodePlace:
    """This pod among those of a job: torchrun's variables, or an Indexed Job's number, or those of a PyTorchJob.

    A PyTorchJob calls the pod's number RANK and the number of pods WORLD_SIZE.
    """
    pet = torchrun_node(environ)
    rank = next((name for name in ("NODE_RANK", "JOB_COMPLETION_INDEX", "RANK") if environ.get(name)), None)
    size = next((name for name in ("NNODES", "WORLD_SIZE") if environ.get(name)), None)
    place = NodePlace(
        nnodes=pet.nnodes or (number(environ, size) if size else None),
        node_rank=pet.node_rank if pet.node_rank is not None else (number(environ, rank) if rank else None),
        master_addr=pet.master_addr or environ.get("MASTER_ADDR"),
        master_port=pet.master_port or (port_of(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None),
        nproc=pet.nproc or environ.get("NPROC_PER_NODE"),
    )
    missing = [
        names
        for value, names in (
            (place.nnodes, "NNODES (or PET_NNODES, WORLD_SIZE)"),
            (place.node_rank, "JOB_COMPLETION_INDEX (or NODE_RANK, PET_NODE_RANK, RANK)"),
            (place.master_addr, "MASTER_ADDR (or PET_MASTER_ADDR)"),
        )
        if value is None
    ]
    if missing:
        raise UsageError(f"--rendezvous kubernetes: the pod's environment lacks {', '.join(missing)}")
    return place


def number(environ: Environment, name: str) -> int:
    """The variable as a whole number; UsageError if it is none."""
    return _whole(name, environ[name])


def port_of(environ: Environment, name: str) -> int:
    """The variable as a port; UsageError if it is none."""
    port = number(environ, name)
    if not 0 < port < 2**16:
        raise UsageError(f"{name}={port}: ports are from 1 to 65535")
    return port


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{name}={text}: expected a whole number")
    return int(text)

"""Decides from the options of `zeroshard run` what is started: one node here, several by ssh, or an mpirun or srun.

no hosts, or this one alone         this process runs the node                    (node.py)
hosts, --launcher ssh or pdsh       a RemoteJob                                   (remote.py)
--launcher openmpi or slurm         mpirun or srun of `zeroshard run --no-ssh ...` (starters.py)
--no-ssh                            this process runs its node of the hostfile
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from zeroshard.cluster import DEFAULT_PORT, NodePlace
from zeroshard.errors import UsageError
from zeroshard.launch import environment, hosts, starters
from zeroshard.launch.hosts import Host
from zeroshard.launch.job import Job, TargetKind
from zeroshard.launch.messages import say
from zeroshard.launch.node import run_node
from zeroshard.launch.rendezvous import Rendezvous, find_place, place_in_environment
from zeroshard.launch.starters import Launcher, StarterOptions

_NAMED_HOSTS = 16  # in the line that says where the job runs


@dataclass(frozen=True)
class HostOptions:
    """The options that say on which hosts the job runs."""

    given: NodePlace
    hostfile: Path | None = None
    include: str | None = None
    exclude: str | None = None
    num_slots: int | None = None
    launcher: Launcher = Launcher.SSH
    starter: StarterOptions = field(default_factory=StarterOptions)
    exports: tuple[str, ...] = ()
    env_file: Path | None = None
    force_multi: bool = False
    no_ssh: bool = False
    rendezvous: Rendezvous = Rendezvous.ENV


def run(job: Job, options: HostOptions) -> int:
    """Run the job; returns the exit status. Raises UsageError for options that contradict each other."""
    check_target(job)
    chosen = _hosts(options)
    if options.launcher in (Launcher.OPENMPI, Launcher.SLURM) and not options.no_ssh:
        _run_by_starter(job, options, chosen)
    if chosen is None and options.force_multi:
        raise UsageError("--force-multi needs a --hostfile")
    if chosen is None or options.no_ssh or (_is_this_host(chosen) and not options.force_multi):
        _apply_variables(options)
        return run_node(_local(job, options, chosen))
    if options.rendezvous is not Rendezvous.ENV:
        raise UsageError(f"--rendezvous {options.rendezvous.value} is for nodes started one by one: add --no-ssh")
    return _run_remote(job, options, chosen)


def _hosts(options: HostOptions) -> tuple[Host, ...] | None:
    """The hosts of the hostfile that take part; None if there is no hostfile and no host was named."""
    if options.hostfile is not None:
        listed = hosts.read_hostfile(options.hostfile)
    elif options.include is not None:
        name = options.include.partition(":")[0]
        if name not in ("localhost", socket.gethostname()) or "@" in options.include:
            raise UsageError(f"--include {options.include}: other hosts than localhost need a --hostfile")
        listed = (_this_host(name),)
    elif options.exclude is not None:
        listed = (_this_host("localhost"),)
    else:
        return None
    return hosts.select(listed, options.include, options.exclude, options.given.nnodes, options.num_slots)


def _this_host(name: str) -> Host:
    # Counted in a process of its own: the guard forks, and a CUDA that was initialized before can't be used after that.
    count = "from zeroshard.launch.resources import resolve_nproc; print(resolve_nproc('auto'))"
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True)
    return Host(name, tuple(range(int(done.stdout))))


def _is_this_host(chosen: Sequence[Host]) -> bool:
    return len(chosen) == 1 and chosen[0].name in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())


def _local(job: Job, options: HostOptions, chosen: Sequence[Host] | None) -> Job:
    """The node that this process runs."""
    given = options.given
    if options.no_ssh and chosen is not None:
        given = replace(given, nnodes=len(chosen))
    elif chosen is not None:
        given = replace(given, nnodes=None)  # this is the one host; --num-nodes counted hosts of the file
    if options.num_slots is not None and chosen is None:
        given = replace(given, nproc=str(options.num_slots))
    if job.nodes is not None:
        return _elastic(job, options, given)
    place = find_place(given, options.rendezvous, os.environ)
    assert place.nnodes is not None
    assert place.node_rank is not None
    job = replace(
        job,
        nproc=place.nproc or "auto",
        nnodes=place.nnodes,
        node_rank=place.node_rank,
        master_addr=place.master_addr,
        master_port=place.master_port,
    )
    if place.nnodes > 1 and (job.max_restarts or job.sizes):
        raise UsageError(
            f"--max-restarts and --elastic with {place.nnodes} nodes: a job of a fixed number of nodes ends when any "
            "of them ends; --nodes MIN:MAX starts a job that continues"
        )
    if chosen is None:
        return job
    return _on_host(job, chosen[place.node_rank if options.no_ssh else 0])


def _elastic(job: Job, options: HostOptions, given: NodePlace) -> Job:
    """A node of an elastic job. It needs no number, only the address of the job's store."""
    if options.hostfile is not None or options.include is not None or options.exclude is not None:
        raise UsageError(
            "--hostfile, --include and --exclude with --nodes MIN:MAX: hosts of an elastic job come and go, so a list "
            "of them is not obeyed; leave it out, and start the same command on each host"
        )
    if given.node_rank is not None:
        raise UsageError("--node-rank: nodes of an elastic job have no fixed numbers; leave it out")
    in_environment = place_in_environment(options.rendezvous, os.environ)
    address = given.master_addr or in_environment.master_addr
    if address is None:
        raise UsageError("--nodes MIN:MAX: give the address of the job's store as --master-addr")
    port = given.master_port or in_environment.master_port or DEFAULT_PORT
    return replace(job, nproc=given.nproc or in_environment.nproc or "auto", master_addr=address, master_port=port)


def _apply_variables(options: HostOptions) -> None:
    """Check --export, and set the variables of --env-file; ranks on this host have all other variables already."""
    for name in options.exports:
        environment.check_asked(name, os.environ)
    if options.env_file is not None:
        os.environ.update(environment.read_file(options.env_file))


def _on_host(job: Job, host: Host) -> Job:
    return replace(job, nproc=str(len(host.slots)), devices=host.slots if host.filtered else None, node_name=host.name)


def _run_remote(job: Job, options: HostOptions, chosen: Sequence[Host]) -> int:
    from zeroshard.launch.channel import open_channels
    from zeroshard.launch.remote import Node, RemoteJob

    if job.max_restarts or job.sizes or job.nodes:
        raise UsageError(
            "--max-restarts, --elastic and --nodes MIN:MAX with hosts that the launcher starts are not built; start "
            "the nodes one by one, with --nodes MIN:MAX and --master-addr"
        )
    if options.given.node_rank is not None:
        raise UsageError("--node-rank goes with --no-ssh; with a hostfile the launcher numbers the nodes itself")
    if options.given.nproc is not None:
        raise UsageError("--nproc: with a hostfile its slots say how many ranks; use --num-gpus for the first so many")
    ranks = sum(len(host.slots) for host in chosen)
    names = ", ".join(f"{host.name} ({len(host.slots)})" for host in chosen[:_NAMED_HOSTS])
    names += f" and {len(chosen) - _NAMED_HOSTS} more" if len(chosen) > _NAMED_HOSTS else ""
    say(f"zeroshard: {_counted(ranks, 'rank')} on {_counted(len(chosen), 'host')}: {names}")
    job = replace(
        job,
        nnodes=len(chosen),
        master_addr=options.given.master_addr,
        master_port=options.given.master_port,
        log_dir=str(Path(job.log_dir).expanduser().absolute()) if job.log_dir else None,
        over_ssh=True,
    )
    jobs = [replace(_on_host(job, host), node_rank=rank) for rank, host in enumerate(chosen)]
    variables = environment.exported(os.environ, options.exports, _env_files(options))
    with open_channels(chosen, options.starter, variables) as channels:
        nodes = [Node(host, one, channel) for host, one, channel in zip(chosen, jobs, channels, strict=True)]
        return RemoteJob(nodes).run()


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _env_files(options: HostOptions) -> list[Path]:
    return environment.find_files(options.env_file, [Path.cwd(), Path.home()])


def _run_by_starter(job: Job, options: HostOptions, chosen: Sequence[Host] | None) -> NoReturn:
    """Become mpirun or srun, which runs `zeroshard run` on each host; each finds its place in the environment."""
    if options.launcher is Launcher.SLURM and chosen is not None:
        raise UsageError(
            "--launcher slurm: Slurm knows its hosts; leave out --hostfile, --include and --exclude, and choose with "
            "--num-nodes, --num-gpus or --launcher-args '--nodelist=...'"
        )
    if options.launcher is Launcher.OPENMPI and (chosen is None or options.hostfile is None):
        raise UsageError("--launcher openmpi needs a --hostfile")
    if job.max_restarts or job.sizes or job.nodes:
        raise UsageError(
            f"--max-restarts, --elastic and --nodes MIN:MAX with --launcher {options.launcher.value} are not built; "
            "start the nodes one by one, with --nodes MIN:MAX and --master-addr"
        )
    variables = environment.exported(os.environ, options.exports, _env_files(options))
    command = starter_command(job, options, chosen, sorted(variables))
    sys.stdout.flush()
    sys.stderr.flush()
    if options.launcher is Launcher.SLURM:
        _keep_input_open()
    # This process becomes the starter, so that signals to it reach the starter. The variables' values are in its
    # environment; its arguments have only their names.
    os.execve(command[0], command, {**os.environ, **variables})


def _keep_input_open() -> None:
    """Make standard input a pipe whose both ends this process holds, so that it ends when the process ends.

    srun passes its input on to its tasks. Tasks survive an srun that is killed, but see their input end.
    """
    read, write = os.pipe()
    os.set_inheritable(write, True)
    os.dup2(read, 0)
    os.close(read)


def starter_command(job: Job, options: HostOptions, chosen: Sequence[Host] | None, exports: Sequence[str]) -> list[str]:
    """The mpirun or srun of a job."""
    node = [sys.executable, "-u", "-m", "zeroshard", "run", "--no-ssh", "--rendezvous", options.launcher.value]
    address = options.given.master_addr
    if options.launcher is Launcher.OPENMPI:
        assert chosen is not None
        address = address or chosen[0].name
    for option, value in (("--master-addr", address), ("--master-port", options.given.master_port)):
        if value is not None:
            node += [option, str(value)]
    node += _ranks_of_node(options, chosen) + job_options(job)
    if options.launcher is Launcher.SLURM:
        node.insert(node.index("--rendezvous"), "--end-with-input")
        return starters.slurm_command(options.given.nnodes, options.starter, exports, node)
    assert chosen is not None
    return starters.openmpi_command(chosen, options.starter, exports, node)


def _ranks_of_node(options: HostOptions, chosen: Sequence[Host] | None) -> list[str]:
    if chosen is None or options.hostfile is None:
        nproc = str(options.num_slots) if options.num_slots is not None else options.given.nproc
        return [] if nproc is None else ["--nproc", nproc]
    # All nodes run the same command, and each reads its line of the file, which must be on all of them like the script.
    words = ["--hostfile", str(options.hostfile.absolute())]
    for option, value in (
        ("--include", options.include),
        ("--exclude", options.exclude),
        ("--num-nodes", options.given.nnodes),
        ("--num-gpus", options.num_slots),
    ):
        if value is not None:
            words += [option, str(value)]
    return words


def job_options(job: Job) -> list[str]:
    """The command-line options of the same job on a node, followed by the target and its arguments."""
    words = ["--rendezvous-timeout", str(job.rendezvous_timeout)]
    if job.log_dir is not None:
        words += ["--log-dir", str(Path(job.log_dir).expanduser().absolute()), "--console", job.console.value]
    if job.core_list is not None:
        words += ["--bind-core-list", job.core_list]
    elif job.bind_cores:
        words.append("--bind-cores")
    words += {TargetKind.SCRIPT: [], TargetKind.MODULE: ["-m"], TargetKind.PROGRAM: ["--no-python"]}[job.kind]
    return [*words, "--", job.target, *job.args]


def check_target(job: Job) -> None:
    """Raises UsageError for a target that does not exist, once here instead of in every rank."""
    match job.kind:
        case TargetKind.SCRIPT:
            path = Path(job.target)
            if not job.target or not path.exists():
                raise UsageError(f"{job.target or repr(job.target)}: no such script")
            if path.is_dir() and not (path / "__main__.py").is_file():
                raise UsageError(f"{job.target}: a folder without __main__.py; name a script")
        case TargetKind.PROGRAM:
            if shutil.which(job.target) is None:
                raise UsageError(f"--no-python {job.target}: no such program, or it may not be executed")
        case TargetKind.MODULE:
            sys.path.insert(0, str(Path.cwd()))
            # Only the first name: to find a submodule would import its package in the launcher.
            if importlib.util.find_spec(job.target.partition(".")[0]) is None:
                raise UsageError(f"-m {job.target}: no such module in {Path.cwd()} or among the installed packages")

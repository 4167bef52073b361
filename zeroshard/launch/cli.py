"""The `zeroshard` command.

Each command imports what it needs: torch's launcher, or the config with its schema, takes time to load, and `--help` or
a wrong option should not wait for that.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import zeroshard
from zeroshard.cluster import NodePlace
from zeroshard.errors import ConfigError, UsageError, ZeroShardError
from zeroshard.launch import dispatch
from zeroshard.launch import options as o
from zeroshard.launch.dispatch import HostOptions
from zeroshard.launch.job import Console, Job, OnSigterm, TargetKind
from zeroshard.launch.rendezvous import Rendezvous
from zeroshard.launch.starters import Launcher, StarterOptions

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command whose arguments are read by another application, which is imported when it is called."""

app = typer.Typer(
    name="zeroshard",
    help="ZeRO training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(zeroshard.__version__)
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """ZeRO training for PyTorch."""


# Options end at the first word that is none: all that follows the script belongs to the script.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: o.Target,
    args: o.Arguments = None,
    nproc: o.Nproc = None,
    module: o.Module = False,
    no_python: o.NoPython = False,
    max_restarts: o.MaxRestarts = None,
    elastic: o.Elastic = None,
    hostfile: o.Hostfile = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    num_gpus: o.NumGpus = None,
    launcher: o.LauncherName = Launcher.SSH,
    launcher_args: o.LauncherArgs = "",
    ssh_port: o.SshPort = None,
    export: o.Export = None,
    env_file: o.EnvFile = None,
    force_multi: o.ForceMulti = False,
    no_ssh: o.NoSsh = False,
    nodes: o.Nnodes = None,
    spares: o.Spares = 0,
    lost_after: o.LostAfter = 3.0,
    last_call: o.LastCall = 30.0,
    on_sigterm: o.AtSigterm = None,
    node_rank: o.NodeRank = None,
    master_addr: o.MasterAddr = None,
    master_port: o.MasterPort = None,
    rendezvous: o.RendezvousName = Rendezvous.ENV,
    rendezvous_timeout: o.RendezvousTimeout = 600,
    bind_cores: o.BindCores = False,
    bind_core_list: o.CoreList = None,
    log_dir: o.LogDir = None,
    console: o.ConsoleRanks = Console.ALL,
    enable_each_rank_log: o.OnlyLogs = None,
    end_with_input: o.EndsWithInput = False,
) -> None:
    """Start SCRIPT once per rank, here or on several hosts. When a rank dies, say which and why, and end the others."""
    in_environment = os.environ.get("PET_NNODES", "")
    nnodes, elastic_nodes = _nodes(
        nodes if nodes is not None or len(set(in_environment.split(":"))) < 2 else in_environment
    )
    if elastic_nodes is None:
        _refuse_elastic_options(spares, on_sigterm)
    job = Job(
        target=script,
        args=tuple(args or ()),
        kind=_kind(module, no_python),
        rendezvous_timeout=rendezvous_timeout,
        max_restarts=max_restarts if max_restarts is not None else 0 if elastic_nodes is None else 3,
        sizes=None if elastic is None else _allowed_sizes(elastic),
        log_dir=enable_each_rank_log or log_dir,
        console=Console.NONE if enable_each_rank_log else console,
        bind_cores=bind_cores or bind_core_list is not None,
        core_list=bind_core_list,
        ends_with_input=end_with_input,
        nodes=elastic_nodes,
        spares=spares,
        lost_after=lost_after,
        last_call=last_call,
        on_sigterm=on_sigterm or OnSigterm.LEAVE,
    )
    if console is not Console.ALL and job.log_dir is None:
        raise UsageError(f"--console {console.value}: give the files in which the output is to be, as --log-dir")
    if nproc is not None and num_gpus is not None:
        raise UsageError("--nproc and --num-gpus both say how many ranks; give one")
    options = HostOptions(
        NodePlace(nnodes, node_rank, master_addr, master_port, nproc),
        hostfile=hostfile,
        include=include,
        exclude=exclude,
        num_slots=num_gpus,
        launcher=launcher,
        starter=StarterOptions(ssh_port, tuple(shlex.split(launcher_args))),
        exports=tuple(export or ()),
        env_file=env_file,
        force_multi=force_multi,
        no_ssh=no_ssh,
        rendezvous=rendezvous,
    )
    raise typer.Exit(dispatch.run(job, options))


@app.command()
def rendezvous(port: o.RendezvousPort = 29500, once: o.Once = False) -> None:
    """Serve the store of an elastic job until it is ended, on a host that outlives the job's nodes."""
    from zeroshard.launch.elastic.serve import serve

    raise typer.Exit(serve(port, once=once))


@app.command(context_settings=_PASSED_ON)
def config(context: typer.Context) -> None:
    """Read and explain configuration files."""
    from zeroshard.config.cli import app as config_app

    config_app(context.args, prog_name="zeroshard config")


@app.command(context_settings=_PASSED_ON)
def plan(context: typer.Context) -> None:
    """Say what a model takes on a cluster, and which setting to take."""
    from zeroshard.planner.show.cli import main as plan_main

    plan_main(context.args)


@app.command(context_settings=_PASSED_ON)
def doctor(context: typer.Context) -> None:
    """Measure this machine, for the planner."""
    from zeroshard.planner.machine.doctor import app as doctor_app

    doctor_app(context.args, prog_name="zeroshard doctor")


@app.command(context_settings=_PASSED_ON)
def checkpoint(context: typer.Context) -> None:
    """Look into checkpoints, verify and prune them."""
    from zeroshard.checkpoint.cli import app as checkpoint_app

    checkpoint_app(context.args, prog_name="zeroshard checkpoint")


@app.command(context_settings=_PASSED_ON)
def audit(context: typer.Context) -> None:
    """Read the log of what was done with checkpoints."""
    from zeroshard.checkpoint.audit_cli import app as audit_app

    audit_app(context.args, prog_name="zeroshard audit")


@app.command(context_settings=_PASSED_ON)
def explain(context: typer.Context) -> None:
    """Say where the time of a run went, from its log."""
    _of_runs("explain", context.args)


@app.command(context_settings=_PASSED_ON)
def report(context: typer.Context) -> None:
    """Write a page with the curves of a run, from its log."""
    _of_runs("report", context.args)


@app.command("top", context_settings=_PASSED_ON)
def show_ranks(context: typer.Context) -> None:
    """Show the ranks of this node that leave metrics."""
    _of_runs("top", context.args)


def _of_runs(command: str, arguments: list[str]) -> None:
    from zeroshard.observe.runs.cli import app as runs_app

    runs_app([command, *arguments], prog_name="zeroshard")


@app.command()
def version() -> None:
    """Print the version."""
    print(zeroshard.__version__)


def main() -> None:
    """Entry point of the `zeroshard` command; a ZeroShardError ends it with one line and status 2."""
    try:
        app()
    except ZeroShardError as error:
        print(f"zeroshard: {error}", file=sys.stderr)
        sys.exit(2)


def _allowed_sizes(config_file: Path) -> tuple[int, ...]:
    from zeroshard.config.elastic_config import elastic_sizes

    try:
        return elastic_sizes(config_file)
    except ConfigError as error:
        raise ConfigError(f"--elastic {config_file}: {error}") from error


def _refuse_elastic_options(spares: int, on_sigterm: OnSigterm | None) -> None:
    """Raises UsageError for options of elastic jobs."""
    if spares:
        raise UsageError("--spares: spare nodes are those of an elastic job; give --nodes MIN:MAX")
    if on_sigterm is not None:
        raise UsageError("--on-sigterm: nodes of elastic jobs may leave alone; give --nodes MIN:MAX")


def _nodes(text: str | None) -> tuple[int | None, tuple[int, int] | None]:
    """The number of nodes of a job, or the least and the most nodes of an elastic one."""
    if text is None:
        return None, None
    found = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text)
    if found is None:
        raise UsageError(f"--nodes {text}: give a number of nodes, or the least and the most as MIN:MAX")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise UsageError(f"--nodes {text}: MIN must be at least 1, and MAX at least MIN")
    return (least, None) if found[2] is None else (None, (least, most))


def _kind(module: bool, no_python: bool) -> TargetKind:
    if module and no_python:
        raise UsageError("--module and --no-python can't be combined")
    return TargetKind.MODULE if module else TargetKind.PROGRAM if no_python else TargetKind.SCRIPT


if __name__ == "__main__":
    main()

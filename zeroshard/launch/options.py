"""The options of `zeroshard run`, each with its names in torchrun and in DeepSpeed's launcher.

They are here, as types, so that the command in cli.py stays readable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeroshard.launch.job import Console, OnSigterm
from zeroshard.launch.rendezvous import Rendezvous
from zeroshard.launch.starters import Launcher

_WHAT, _HOSTS, _BY_HAND, _PLACE = "What to run", "Several hosts", "Nodes started one by one", "Cores and output"

Target = Annotated[
    str, typer.Argument(help="The training script, with -m a module, with --no-python a program.", show_default=False)
]
Arguments = Annotated[list[str] | None, typer.Argument(help="Its arguments, passed on untouched.")]
Module = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.", rich_help_panel=_WHAT)
]
NoPython = Annotated[
    bool, typer.Option("--no-python", "--no_python", help="SCRIPT is a program of its own.", rich_help_panel=_WHAT)
]
Nproc = Annotated[
    str | None,
    typer.Option(
        "--nproc",
        "--nproc-per-node",
        "--nproc_per_node",
        help="Ranks on this node: a number, auto, gpu or cpu. [default: auto]",
        show_default=False,
        rich_help_panel=_WHAT,
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        "--max_restarts",
        min=0,
        help="How often all ranks are restarted when one dies; in an elastic job, how often the ranks of a node are "
        "without a step in between. [default: 0; in an elastic job 3]",
        show_default=False,
        rich_help_panel=_WHAT,
    ),
]
Elastic = Annotated[
    Path | None,
    typer.Option(
        "--elastic",
        metavar="CONFIG",
        help="Run as many ranks as the elasticity section of this config allows and there is place for; a restart "
        "leaves out the place of a rank that was killed.",
        show_default=False,
        rich_help_panel=_WHAT,
    ),
]
Hostfile = Annotated[
    Path | None,
    typer.Option(
        "-H",
        "--hostfile",
        help="Lines 'host slots=N': start N ranks on each host.",
        show_default=False,
        rich_help_panel=_HOSTS,
    ),
]
Include = Annotated[
    str | None,
    typer.Option(
        "-i",
        "--include",
        help="Only these hosts and slots: host1:0,2@host2.",
        show_default=False,
        rich_help_panel=_HOSTS,
    ),
]
Exclude = Annotated[
    str | None,
    typer.Option("-e", "--exclude", help="All but these: host1:1@host2.", show_default=False, rich_help_panel=_HOSTS),
]
NumGpus = Annotated[
    int | None,
    typer.Option(
        "--num-gpus",
        "--num_gpus",
        min=1,
        help="The first so many slots of each host; without a hostfile the ranks of this node.",
        show_default=False,
        rich_help_panel=_HOSTS,
    ),
]
LauncherName = Annotated[Launcher, typer.Option("--launcher", help="What starts the nodes.", rich_help_panel=_HOSTS)]
LauncherArgs = Annotated[
    str,
    typer.Option(
        "--launcher-args",
        "--launcher_args",
        help="Further arguments for ssh, mpirun or srun, as one quoted string.",
        rich_help_panel=_HOSTS,
    ),
]
SshPort = Annotated[
    int | None,
    typer.Option(
        "--ssh-port",
        "--ssh_port",
        "-p",
        min=1,
        max=65535,
        help="Port of the hosts' sshd.",
        show_default=False,
        rich_help_panel=_HOSTS,
    ),
]
Export = Annotated[
    list[str] | None,
    typer.Option(
        "--export",
        help="Also pass on this variable, or all that match (HF_*). May be repeated.",
        show_default=False,
        rich_help_panel=_HOSTS,
    ),
]
EnvFile = Annotated[
    Path | None,
    typer.Option(
        "--env-file",
        "--env_file",
        help="Lines NAME=VALUE for the nodes. [default: .zeroshard_env or .deepspeed_env, here or in the home]",
        show_default=False,
        rich_help_panel=_HOSTS,
    ),
]
ForceMulti = Annotated[
    bool,
    typer.Option(
        "--force-multi", "--force_multi", help="Use ssh even if this is the only host.", rich_help_panel=_HOSTS
    ),
]
NoSsh = Annotated[
    bool,
    typer.Option(
        "--no-ssh",
        "--no_ssh",
        help="Run this node's part; the command is run on each host, with its --node-rank.",
        rich_help_panel=_BY_HAND,
    ),
]
Nnodes = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        "--nnodes",
        "--num-nodes",
        "--num_nodes",
        metavar="N or MIN:MAX",
        help="Number of nodes; of a hostfile the first so many. MIN:MAX is an elastic job, which continues with the "
        "nodes that are left. [default: 1]",
        show_default=False,
        rich_help_panel=_BY_HAND,
    ),
]
Spares = Annotated[
    int,
    typer.Option(
        "--spares", min=0, help="Nodes beyond MAX that may wait for one to be lost.", rich_help_panel=_BY_HAND
    ),
]
LostAfter = Annotated[
    float,
    typer.Option(
        "--lost-after",
        min=0.5,
        help="Seconds of silence after which a node of an elastic job is lost.",
        rich_help_panel=_BY_HAND,
    ),
]
AtSigterm = Annotated[
    OnSigterm | None,
    typer.Option(
        "--on-sigterm",
        "--on_sigterm",
        help="What a node of an elastic job does at SIGTERM: leave the job between two steps (if the others can't go "
        "on without it, all save), or let all ranks save and end. [default: leave]",
        show_default=False,
        rich_help_panel=_BY_HAND,
    ),
]
LastCall = Annotated[
    float,
    typer.Option(
        "--last-call",
        min=0,
        help="Seconds without a new node after which an elastic job begins with fewer than MAX nodes.",
        rich_help_panel=_BY_HAND,
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        "--node-rank",
        "--node_rank",
        min=0,
        help="This node's number, from 0. [default: 0]",
        show_default=False,
        rich_help_panel=_BY_HAND,
    ),
]
MasterAddr = Annotated[
    str | None,
    typer.Option(
        "--master-addr",
        "--master_addr",
        help="Address of node 0. [default with a hostfile: the address at which ssh reached it]",
        show_default=False,
        rich_help_panel=_BY_HAND,
    ),
]
MasterPort = Annotated[
    int | None,
    typer.Option(
        "--master-port",
        "--master_port",
        min=1,
        max=65535,
        help="Port on node 0. [default: any free one; nodes started one by one: 29500]",
        show_default=False,
        rich_help_panel=_BY_HAND,
    ),
]


def _rendezvous(value: str) -> Rendezvous:
    names = ", ".join(one.value for one in Rendezvous)
    if value in names.split(", "):
        return Rendezvous(value)
    if value.startswith("etcd"):
        raise typer.BadParameter(
            f"{value}: nodes meet in a store of torch's own, served by `zeroshard rendezvous`; torch's EtcdStore lacks "
            f"operations that rounds need (docs/decisions/0033). This option is one of {names}"
        )
    raise typer.BadParameter(f"{value!r} is none of {names}")


RendezvousName = Annotated[
    Rendezvous,
    typer.Option(
        "--rendezvous",
        parser=_rendezvous,
        metavar="|".join(one.value for one in Rendezvous),
        help="Which variables say what the options leave out about this node: torchrun's PET_* variables, or those "
        "of a pod, a Slurm step or an mpirun.",
        rich_help_panel=_BY_HAND,
    ),
]
RendezvousTimeout = Annotated[
    int,
    typer.Option(
        "--rendezvous-timeout", min=1, help="Seconds until missing nodes are an error.", rich_help_panel=_BY_HAND
    ),
]
BindCores = Annotated[
    bool,
    typer.Option(
        "--bind-cores",
        "--bind-cores-to-rank",
        "--bind_cores_to_rank",
        help="Give each rank cores of its own, on the NUMA node of its GPU.",
        rich_help_panel=_PLACE,
    ),
]
CoreList = Annotated[
    str | None,
    typer.Option(
        "--bind-core-list",
        "--bind_core_list",
        help="The cores to divide: 0-27,56. Implies --bind-cores.",
        show_default=False,
        rich_help_panel=_PLACE,
    ),
]
LogDir = Annotated[
    str | None,
    typer.Option(
        "--log-dir",
        "--log_dir",
        help="Also write each rank's output to DIR/rank_N.out and .err.",
        show_default=False,
        rich_help_panel=_PLACE,
    ),
]
ConsoleRanks = Annotated[
    Console,
    typer.Option("--console", help="With --log-dir: whose output is shown as well.", rich_help_panel=_PLACE),
]
OnlyLogs = Annotated[
    str | None,
    typer.Option(
        "--enable-each-rank-log",
        "--enable_each_rank_log",
        help="DeepSpeed's name for --log-dir DIR --console none.",
        show_default=False,
        rich_help_panel=_PLACE,
    ),
]
EndsWithInput = Annotated[bool, typer.Option("--end-with-input", hidden=True, help="Used by --launcher slurm.")]
RendezvousPort = Annotated[int, typer.Option("--port", min=1, max=65535, help="Where to listen.")]
Once = Annotated[bool, typer.Option("--once", help="End when the job ends, with its status.")]

"""The `zeroshard` command.

What a command needs is imported inside it: torch's launcher, or the config with its schema, takes a while to load, and
`--help` or a mistyped option should not wait for it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import zeroshard
from zeroshard.errors import UsageError, ZeroShardError
from zeroshard.launch.resources import resolve_nproc, set_threads

app = typer.Typer(
    name="zeroshard",
    help="ZeRO training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# Options stop at the first word that is none: all that follows the script is the script's, whatever it looks like.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="The training script, or with -m a module.", show_default=False)],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments, passed on untouched.")] = None,
    nproc: Annotated[str, typer.Option(help="Ranks on this node: a number, auto, gpu or cpu.")] = "auto",
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    nnodes: Annotated[int, typer.Option(min=1, help="Nodes of the job; run the command on each.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="This node's number, from 0.")] = 0,
    master_addr: Annotated[str | None, typer.Option(help="Address of node 0.", show_default=False)] = None,
    master_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port on node 0. [default: any free one; several nodes: 29500]"),
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restart all ranks so often when one dies.")] = 0,
) -> None:
    """Start SCRIPT once per rank. When a rank dies, say which one and why, and end the others."""
    _check_nodes(nnodes, node_rank, master_addr)
    _check_target(script, module)
    ranks = resolve_nproc(nproc)
    threads = set_threads(ranks, os.environ)
    print(f"zeroshard: {ranks} rank{'s' if ranks > 1 else ''} on this node, {threads}", file=sys.stderr, flush=True)

    from zeroshard.launch.agent import Job, launch

    job = Job(
        target=script,
        args=tuple(args or ()),
        module=module,
        nproc=ranks,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        max_restarts=max_restarts,
    )
    raise typer.Exit(launch(job))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def config(context: typer.Context) -> None:
    """Read and explain configuration files."""
    from zeroshard.config.cli import app as config_app

    config_app(context.args, prog_name="zeroshard config")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def checkpoint(context: typer.Context) -> None:
    """Look into checkpoints, verify and prune them."""
    from zeroshard.checkpoint.cli import app as checkpoint_app

    checkpoint_app(context.args, prog_name="zeroshard checkpoint")


@app.command()
def version() -> None:
    """Print the version."""
    print(zeroshard.__version__)


def main() -> None:
    """Entry point of the `zeroshard` command: our errors end in one line and status 2."""
    try:
        app()
    except ZeroShardError as error:
        print(f"zeroshard: {error}", file=sys.stderr)
        sys.exit(2)


def _check_nodes(nnodes: int, node_rank: int, master_addr: str | None) -> None:
    if nnodes > 1 and master_addr is None:
        raise UsageError(f"--nnodes {nnodes}: the nodes meet at node 0; give its address as --master-addr")
    if node_rank >= nnodes:
        raise UsageError(f"--node-rank {node_rank}: with --nnodes {nnodes} it is from 0 to {nnodes - 1}")


def _check_target(script: str, module: bool) -> None:
    if not module:
        if not Path(script).exists():
            raise UsageError(f"{script}: no such script")
        return
    sys.path.insert(0, str(Path.cwd()))
    # The first name only: finding a submodule would import its package, in the launcher.
    if importlib.util.find_spec(script.partition(".")[0]) is None:
        raise UsageError(f"-m {script}: no such module in {Path.cwd()} or among the installed packages")

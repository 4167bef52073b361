"""A node's part of a job, as a value: the launcher sends it to the node, and the agent runs it.

    command line, hostfile, environment  -->  Job per node  -->  guard.py  -->  agent.py  -->  torchrun's elastic agent

It has a JSON form, so that a node at the other end of an ssh gets exactly what a local node gets. Rejected: to pass the
command line on, which each node would resolve again in its own environment.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum

from zeroshard.errors import UsageError

ORDERED_FILE = "ordered"
"""A file in the node's directory, which exists if the launcher has told the node to stop; the launcher reports why."""


class TargetKind(str, Enum):
    """What the target is, and so how each rank starts it."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


class OnSigterm(str, Enum):
    """What a node of an elastic job does at SIGTERM."""

    LEAVE = "leave"
    """It leaves between two steps; if the others can't go on without it, all ranks save and end."""
    SAVE = "save"
    """All ranks of the job save and end."""


class Console(str, Enum):
    """Which ranks' output is shown when all output is also written to files."""

    ALL = "all"
    FIRST = "first"
    NONE = "none"


@dataclass(frozen=True)
class Job:
    """What a node runs, and the node's place in the job.

    Attributes:
        target, args, kind: the script, module or program, and its arguments.
        nproc: number of ranks on this node, or `auto`, `gpu` or `cpu`.
        devices: the GPUs that the ranks may see, by their numbers among those that this process sees; None for all.
        nnodes, node_rank: number of nodes, and this node's number.
        node_name: the node's name in reports; None for its host name.
        master_addr, master_port: of node 0, or of the store of an elastic job; on a single node None is any free port.
        rendezvous_timeout: seconds until missing nodes are an error.
        max_restarts: how often ranks are started again after a failure.
        sizes: the allowed numbers of ranks; None for the one that `nproc` says.
        log_dir: folder for files with each rank's output; None for none.
        console: which ranks' output is shown if there are such files.
        bind_cores, core_list: whether ranks are bound to cores of their own, and to which; None for all.
        nodes: the least and the most nodes of an elastic job; None for a job with a fixed number of nodes.
        spares: number of further nodes of an elastic job that may wait.
        lost_after: seconds of silence after which a node of an elastic job is lost.
        on_sigterm: what a node of an elastic job does at SIGTERM.
        last_call: seconds without a new node after which an elastic job begins with fewer than the most nodes.
        over_ssh: whether a launcher watches the node through its standard streams.
        ends_with_input: whether the end of standard input means that the process that started the node has ended.
    """

    target: str
    args: tuple[str, ...] = ()
    kind: TargetKind = TargetKind.SCRIPT
    nproc: str = "auto"
    devices: tuple[int, ...] | None = None
    nnodes: int = 1
    node_rank: int = 0
    node_name: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rendezvous_timeout: int = 600
    max_restarts: int = 0
    sizes: tuple[int, ...] | None = None
    log_dir: str | None = None
    console: Console = Console.ALL
    bind_cores: bool = False
    core_list: str | None = None
    nodes: tuple[int, int] | None = None
    spares: int = 0
    lost_after: float = 3.0
    last_call: float = 30.0
    on_sigterm: OnSigterm = OnSigterm.LEAVE
    over_ssh: bool = False
    ends_with_input: bool = False

    def to_json(self) -> str:
        """The job as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        """The job that `to_json` wrote. Raises UsageError if another version of zeroshard wrote it."""
        values = json.loads(text)
        known = {field.name for field in fields(Job)}
        if set(values) != known:
            raise UsageError("the launcher and this node run different versions of zeroshard; install the same on both")
        values["args"] = tuple(values["args"])
        if values["sizes"] is not None:
            values["sizes"] = tuple(values["sizes"])
        if values["nodes"] is not None:
            values["nodes"] = (values["nodes"][0], values["nodes"][1])
        values["kind"] = TargetKind(values["kind"])
        values["console"] = Console(values["console"])
        values["on_sigterm"] = OnSigterm(values["on_sigterm"])
        if values["devices"] is not None:
            values["devices"] = tuple(values["devices"])
        return Job(**values)

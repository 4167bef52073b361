"""What one node runs: the value that a launcher sends and that an agent obeys.

    command line, hostfile, environment  -->  Job per node  -->  guard.py  -->  agent.py  -->  torchrun's elastic agent

It is plain data with a JSON form, so that the node at the other end of an ssh gets exactly what a local one would.
Passing the command line on instead was rejected: each node would resolve it again, against its own environment.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum

from zeroshard.errors import UsageError

ORDERED_FILE = "ordered"
"""In the node's directory if its launcher, which knows why, has told it to stop."""


class TargetKind(str, Enum):
    """How TARGET is started in each rank."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


class Console(str, Enum):
    """Whose output is shown when each rank's output also goes to files."""

    ALL = "all"
    FIRST = "first"
    NONE = "none"


@dataclass(frozen=True)
class Job:
    """What to run, and this node's place in it. `master_port` None on a single node: any free port.

    `nproc` is a number of ranks, `auto`, `gpu` or `cpu`. `devices` are the GPUs to show to the ranks, by their numbers
    among those that the node shows to us; None for all. `node_name` is what the node is called in reports.
    `sizes` are the numbers of ranks that there may be; None for the one that `nproc` says.
    `nodes` are the least and the most nodes of an elastic job, whose nodes come and go; `spares` more may wait, and one
    that was silent for `lost_after` seconds is lost. It begins with fewer than the most after `last_call` seconds.
    `over_ssh` nodes are watched by a launcher at the other end of their standard streams; a node that `ends_with_input`
    takes the end of its standard input for the death of what started it.
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
    over_ssh: bool = False
    ends_with_input: bool = False

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        """The job that `to_json` wrote; UsageError if it is of another version of zeroshard."""
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
        if values["devices"] is not None:
            values["devices"] = tuple(values["devices"])
        return Job(**values)

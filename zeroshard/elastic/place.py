"""Which rank this process is in each round of an elastic job; its node says so at the gate (`launch/elastic/gate.py`).

The answer is put into the environment, where torch and other libraries read it, so scripts need not know of rounds.
Only the standard library is imported, since the launcher's runner waits here before the script imports anything.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

SOCKET_VARIABLE = "ZEROSHARD_NODE"
ROUND_VARIABLE = "ZEROSHARD_ROUND"


@dataclass(frozen=True)
class Place:
    """A rank's place in a round.

    Attributes:
        group_rank, group_world_size: the number of this node, and the number of nodes in the round.
        store: address and port of a store for the ranks of this round; it ends with the round's first node.
        job_store: address and port of the store of all nodes of the job.
        lost: whether ranks of the round before are gone; its errors may follow from that.
        why: what ended the round before.
        counts: number of ranks of each node of the round, in the order of their ranks.
        memory_servers: addresses and ports of the nodes' memory servers: nodes of the round in order, then others.
        token: what memory servers demand with each request.
    """

    round: int
    rank: int
    world_size: int
    group_rank: int
    group_world_size: int
    store: tuple[str, int]
    job_store: tuple[str, int]
    lost: bool = False
    why: str = ""
    counts: tuple[int, ...] = ()
    memory_servers: tuple[tuple[str, int], ...] = ()
    token: str = ""

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Set the variables that torch's env:// and others read."""
        address, port = self.store
        environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            ROLE_RANK=str(self.rank),
            ROLE_WORLD_SIZE=str(self.world_size),
            GROUP_RANK=str(self.group_rank),
            GROUP_WORLD_SIZE=str(self.group_world_size),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE=str(True),
            TORCHELASTIC_RESTART_COUNT=str(self.round),
        )
        environ[ROUND_VARIABLE] = json.dumps(asdict(self))

    @staticmethod
    def from_json(values: dict[str, Any]) -> Place:
        address, port = values["store"]
        where, number = values["job_store"]
        memory_servers = tuple((host, at) for host, at in values.get("memory_servers", ()))
        counts = tuple(values.get("counts", ()))
        places = {"store": (address, port), "job_store": (where, number)}
        return Place(**{**values, **places, "counts": counts, "memory_servers": memory_servers})


def place_in(environ: MutableMapping[str, str]) -> Place | None:
    """The place that `Place.export` wrote into `environ`; None outside of an elastic job."""
    text = environ.get(ROUND_VARIABLE)
    return None if text is None else Place.from_json(json.loads(text))


def await_place(left: int = -1, trouble: str = "") -> Place:
    """Wait at the gate for the next round, and export this process's place in it into the environment.

    Args:
        left: the round in which this process was before; -1 for none.
        trouble: why it left that round within a step; "" if it left between two steps.

    Raises:
        SystemExit: the job is over.
    """
    request = {"op": "gate", "local_rank": local_rank(), "left": left, "trouble": trouble}
    with connect_node() as node:
        node.sendall(json.dumps(request).encode() + b"\n")
        with node.makefile("rb") as lines:
            answer = lines.readline()
    if not answer:
        raise SystemExit(1)  # the node has ended, which says why
    values = json.loads(answer)
    if "end" in values:
        raise SystemExit(values["end"])
    place = Place.from_json(values)
    place.export(os.environ)
    return place


def local_rank() -> int:
    """This process's number on its node, which is the same in all rounds."""
    return int(os.environ["LOCAL_RANK"])


def connect_node() -> socket.socket:
    """A connection to the node's socket. Raises SystemExit if the node has ended."""
    node = socket.socket(socket.AF_UNIX)
    try:
        node.connect(os.environ[SOCKET_VARIABLE])
    except OSError as error:
        node.close()
        raise SystemExit(1) from error
    return node

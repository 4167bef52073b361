"""Which rank this process is, from round to round: asked of its node, at the gate (see `launch/elastic/gate.py`).

The answer goes into the environment, where torch and libraries look for it, so scripts need not know of rounds. Only
the standard library is imported, since the launcher's runner asks before the script has chosen what to import.
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
        group_rank, group_world_size: the node's place among the nodes.
        store: address and port of a store for the ranks of this round, which ends with the round's first node.
        meeting: those of the store in which the nodes meet.
        lost: whether ranks of the round before are gone, so that errors in it may follow from that.
        why: what ended the round before.
        counts: ranks of each node of the round, in the order of their ranks.
        keepers: where nodes give out the memory that they hold: those of the round in order, then others that live.
        token: what they want to be shown.
    """

    round: int
    rank: int
    world_size: int
    group_rank: int
    group_world_size: int
    store: tuple[str, int]
    meeting: tuple[str, int]
    lost: bool = False
    why: str = ""
    counts: tuple[int, ...] = ()
    keepers: tuple[tuple[str, int], ...] = ()
    token: str = ""

    def put(self, environ: MutableMapping[str, str]) -> None:
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
        where, number = values["meeting"]
        keepers = tuple((host, at) for host, at in values.get("keepers", ()))
        counts = tuple(values.get("counts", ()))
        places = {"store": (address, port), "meeting": (where, number)}
        return Place(**{**values, **places, "counts": counts, "keepers": keepers})


def place_in(environ: MutableMapping[str, str]) -> Place | None:
    """The place that was put there; None outside of an elastic job."""
    text = environ.get(ROUND_VARIABLE)
    return None if text is None else Place.from_json(json.loads(text))


def await_place(left: int = -1, trouble: str = "") -> Place:
    """Wait at the gate for the next round, and put this process's place in it into the environment.

    Args:
        left: the round that this process was in.
        trouble: why it left that amid a step.

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
    place.put(os.environ)
    return place


def local_rank() -> int:
    """This process's number on its node; it is the same in all rounds."""
    return int(os.environ["LOCAL_RANK"])


def connect_node() -> socket.socket:
    """A connection to the node. Raises SystemExit where it has ended."""
    node = socket.socket(socket.AF_UNIX)
    try:
        node.connect(os.environ[SOCKET_VARIABLE])
    except OSError as error:
        node.close()
        raise SystemExit(1) from error
    return node

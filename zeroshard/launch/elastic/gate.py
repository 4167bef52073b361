"""Where the ranks of one node wait for a round, and hear of its end: a socket in the node's private directory.

    rank --{"op": "gate", "local_rank": 0, "left": 0, "trouble": "rank 3 is gone"}--> node      waits for its answer
         <--{"round": 1, "rank": 2, "world_size": 6, ...}-----------------------------
    rank --{"op": "watch", "local_rank": 0, "stays": true}--------------------------> node      a second connection
         <--{"event": "trouble", "why": ...}, {"event": "regroup", ...}---------------

A line of JSON each way, and descriptors of memory beside it (`Extra`). The directory is readable for the node's user
alone, so whoever can connect may. Rejected: signals, which say nothing and interrupt the script, and files, which would
have to be polled.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Message = dict[str, Any]
SOCKET_FILE = "node"
_CHUNK = 1 << 16
_MOST_DESCRIPTORS = 4


class Extra(Protocol):
    """Answers what ranks ask beside the gate."""

    def answer(self, owner: object, message: Message, descriptors: list[int]) -> Message:
        """A request of a rank over the connection `owner`; whoever gets the descriptors closes them."""
        ...

    def closed(self, owner: object) -> None:
        """The connection has ended."""
        ...


@dataclass(frozen=True)
class Waiting:
    """What a rank said when it came to the gate.

    Attributes:
        left: the round that it was in.
        trouble: why it left that amid a step.
        restart: whether it can't go on as a process.
    """

    connection: socket.socket
    left: int
    trouble: str
    restart: bool


class Gate:
    """The gate of a node with `ranks` ranks.

    Args:
        changed: called when a rank has come to the gate, has gone from it, or has begun to listen.
        extra: answers all other requests.
    """

    def __init__(self, directory: Path, ranks: int, changed: Callable[[], None], extra: Extra) -> None:
        self.path = directory / SOCKET_FILE
        self._ranks, self._changed, self._extra = ranks, changed, extra
        self._lock = threading.Lock()
        self._waiting: dict[int, Waiting] = {}
        self._watching: dict[int, tuple[socket.socket, bool]] = {}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.path))
        self._server.listen(4 * ranks)
        threading.Thread(target=self._accept, name="gate", daemon=True).start()

    def waiting(self) -> dict[int, Waiting]:
        """The ranks at the gate, by local rank."""
        with self._lock:
            return dict(self._waiting)

    def all_wait(self) -> bool:
        return len(self.waiting()) == self._ranks

    def listening(self) -> dict[int, bool]:
        """The ranks that hear what is told, and whether they stay as processes from round to round."""
        with self._lock:
            return {local: stays for local, (_, stays) in self._watching.items()}

    def open(self, places: Mapping[int, Message]) -> None:
        """Let the ranks go, each with its answer."""
        with self._lock:
            going, self._waiting = self._waiting, {}
        for local, waiting in going.items():
            _send(waiting.connection, places[local])

    def tell(self, event: Message) -> None:
        """To all that listen."""
        with self._lock:
            connections = [connection for connection, _ in self._watching.values()]
        for connection in connections:
            _send(connection, event)

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(connection,), name="gate-rank", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection until its end, which is the rank's where that has died."""
        lines = Lines(connection)
        with suppress(OSError, ValueError), connection:
            while (got := lines.read()) is not None:
                message, descriptors = got
                if message["op"] == "gate":
                    with self._lock:
                        self._waiting[message["local_rank"]] = Waiting(
                            connection, message["left"], message["trouble"], message.get("restart", False)
                        )
                    self._changed()
                elif message["op"] == "watch":
                    with self._lock:
                        self._watching[message["local_rank"]] = (connection, message["stays"])
                    self._changed()
                else:
                    _send(connection, self._extra.answer(connection, message, descriptors))
        self._extra.closed(connection)
        with self._lock:
            self._waiting = {rank: one for rank, one in self._waiting.items() if one.connection is not connection}
            self._watching = {rank: one for rank, one in self._watching.items() if one[0] is not connection}
        self._changed()


class Lines:
    """Messages of a connection, each with the descriptors that came before its end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._held = bytearray()
        self._descriptors: list[int] = []

    def read(self) -> tuple[Message, list[int]] | None:
        """The next one; None at the end."""
        while (end := self._held.find(b"\n")) < 0:
            data, descriptors, _, _ = socket.recv_fds(self._connection, _CHUNK, _MOST_DESCRIPTORS)
            self._descriptors += descriptors
            if not data:
                for descriptor in self._descriptors:
                    os.close(descriptor)
                return None
            self._held += data
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        descriptors, self._descriptors = self._descriptors, []
        return json.loads(line), descriptors


def _send(connection: socket.socket, message: Message) -> None:
    with suppress(OSError):  # the rank has ended
        connection.sendall(json.dumps(message).encode() + b"\n")

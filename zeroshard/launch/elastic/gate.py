"""The gate of a node: a socket in its private directory, where its ranks wait for a round and are told of its end.

    rank --{"op": "gate", "local_rank": 0, "left": 0, "trouble": "rank 3 is gone"}--> node      waits for its answer
         <--{"round": 1, "rank": 2, "world_size": 6, ...}-----------------------------
    rank --{"op": "watch", "local_rank": 0, "stays": true}--------------------------> node      a second connection
         <--{"event": "trouble", "why": ...}, {"event": "regroup", ...}---------------
         ---{"op": "step", "step": 7}------------------------------------------------>      after each step

Messages are lines of JSON; descriptors of memory are sent with them (`RequestHandler`). Only the node's user can read
the directory, so every connection is accepted. Rejected: signals, which carry no text and interrupt the script; files,
which would have to be polled.
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


class RequestHandler(Protocol):
    """Answers requests of ranks that are not about the gate."""

    def answer(self, owner: object, message: Message, descriptors: list[int]) -> Message:
        """Answer a request of a rank that came over the connection `owner`; takes over the descriptors."""
        ...

    def closed(self, owner: object) -> None:
        """The connection has ended."""
        ...


@dataclass(frozen=True)
class Waiting:
    """A rank at the gate.

    Attributes:
        left: the round in which it was before; -1 for none.
        trouble: why it left that round within a step; "" if it left between two steps.
        restart: whether its process can't continue, and has to be started again.
    """

    connection: socket.socket
    left: int
    trouble: str
    restart: bool


class Gate:
    """The gate of a node with `ranks` ranks.

    Args:
        directory: where the socket is made.
        changed: called when a rank has come to the gate, has left it, or has begun to listen.
        other_requests: answers all other requests.
    """

    def __init__(
        self, directory: Path, ranks: int, changed: Callable[[], None], other_requests: RequestHandler
    ) -> None:
        self.path = directory / SOCKET_FILE
        self._ranks, self._changed, self._other_requests = ranks, changed, other_requests
        self._lock = threading.Lock()
        self._waiting: dict[int, Waiting] = {}
        self._watching: dict[int, tuple[socket.socket, bool]] = {}
        self._most_steps = 0
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.path))
        self._server.listen(4 * ranks)
        threading.Thread(target=self._accept, name="gate", daemon=True).start()

    def waiting(self) -> dict[int, Waiting]:
        """The ranks at the gate, by local rank."""
        with self._lock:
            return dict(self._waiting)

    def all_are_waiting(self) -> bool:
        return len(self.waiting()) == self._ranks

    def listening(self) -> dict[int, bool]:
        """The local ranks that receive events, and whether their processes stay from round to round."""
        with self._lock:
            return {local: stays for local, (_, stays) in self._watching.items()}

    def most_steps(self) -> int:
        """The number of the last step that the ranks of this node have told of."""
        with self._lock:
            return self._most_steps

    def open(self, places: Mapping[int, Message]) -> None:
        """Answer all waiting ranks, each with its entry of `places` by local rank; they leave the gate."""
        with self._lock:
            going, self._waiting = self._waiting, {}
        for local, waiting in going.items():
            _send(waiting.connection, places[local])

    def tell(self, event: Message) -> None:
        """Send an event to all ranks that listen."""
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
        """Serve one connection until its end, which is the rank's end if that dies."""
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
                elif message["op"] == "step":
                    with self._lock:
                        self._most_steps = max(self._most_steps, message["step"])
                else:
                    _send(connection, self._other_requests.answer(connection, message, descriptors))
        self._other_requests.closed(connection)
        with self._lock:
            self._waiting = {rank: one for rank, one in self._waiting.items() if one.connection is not connection}
            self._watching = {rank: one for rank, one in self._watching.items() if one[0] is not connection}
        self._changed()


class Lines:
    """Reads messages from a connection, each with the descriptors that came with it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._descriptors: list[int] = []

    def read(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors; None at the end of the connection."""
        while (end := self._buffer.find(b"\n")) < 0:
            data, descriptors, _, _ = socket.recv_fds(self._connection, _CHUNK, _MOST_DESCRIPTORS)
            self._descriptors += descriptors
            if not data:
                for descriptor in self._descriptors:
                    os.close(descriptor)
                return None
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        descriptors, self._descriptors = self._descriptors, []
        return json.loads(line), descriptors


def _send(connection: socket.socket, message: Message) -> None:
    with suppress(OSError):  # the rank has ended
        connection.sendall(json.dumps(message).encode() + b"\n")

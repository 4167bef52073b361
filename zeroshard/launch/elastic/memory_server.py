"""The memory server of a node: holds images of its ranks' state after a step, and copies of images of other nodes.

    rank     --slot (a descriptor of memory)--> server         it holds the memory open, so that it outlives the rank
             --hold: slot, round, step, table-> server         from now on that slot is an image of this step
    node 1   --push: table and bytes----------> server         a copy of an image of node 1, for the loss of node 1
    any rank --list, table, read--------------> server         reads images, to continue from them

An image is a rank's part of the state as bytes, and a table that says which tensors they are, with checksums, which
readers compare. The memory has no name in a file system, and nothing is written to a disk. Requests over the network
need a token, which is in the job's store, so only members of the job can read its state.
"""

from __future__ import annotations

import hmac
import json
import os
import socketserver
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Version = tuple[int, int]
_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class Image:
    """A rank's part of the state after a step.

    Attributes:
        version: (round, step); a larger one is newer.
        rank: the rank in that round.
        own: whether a rank of this node made it; else it is a copy from another node.
        table: which tensors the bytes are, and their checksums.
        descriptor: of the memory.
    """

    name: str
    version: Version
    rank: int
    own: bool
    table: bytes
    descriptor: int
    nbytes: int


@dataclass
class _Slot:
    """Memory of a rank; `owner` is its connection, or None if that has ended: the slot then ends with its image."""

    descriptor: int
    owner: object | None


class MemoryServer:
    """The images that a node holds; its own ranks' requests come through `answer`, those of others through a port.

    Attributes:
        port: the TCP port for requests of other nodes.
        asked_at: when another node has asked last, in seconds of the monotonic clock.
        token: what these requests must contain; none is answered while it is "".
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, _Slot] = {}
        self._images: dict[str, Image] = {}
        self._count = 0
        self.token, self.asked_at = "", 0.0
        memory_server = self

        class Handler(socketserver.StreamRequestHandler):
            # An answer is a line and then bytes, which Nagle's algorithm would delay until the line is acknowledged.
            disable_nagle_algorithm = True

            def handle(self) -> None:
                memory_server._serve(self)

        self._server = socketserver.ThreadingTCPServer(("", 0), Handler, bind_and_activate=True)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="memory_server", daemon=True).start()

    def close(self) -> None:
        """End the server, and free all memory."""
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            for image in self._images.values():
                if not image.own:
                    os.close(image.descriptor)
            for slot in self._slots.values():
                os.close(slot.descriptor)
            self._images.clear()
            self._slots.clear()

    # Requests of this node's ranks.

    def answer(self, owner: object, message: Message, descriptors: Sequence[int]) -> Message:
        """See RequestHandler; a request of a rank of this node."""
        op = message["op"]
        if op == "slot":
            with self._lock:
                self._slots[message["slot"]] = _Slot(descriptors[0], owner)
        elif op == "drop":
            with self._lock:
                self._drop_images([image for image in self._images.values() if image.name == message["slot"]])
                if message["ends"]:
                    os.close(self._slots.pop(message["slot"]).descriptor)
        elif op == "hold":
            self._make_image(message)
        else:
            return {"error": f"unknown request {op!r}"}
        return {}

    def closed(self, owner: object) -> None:
        """See RequestHandler; the images of the rank stay."""
        with self._lock:
            used = {image.name for image in self._images.values()}
            for name, slot in list(self._slots.items()):
                if slot.owner is owner:
                    slot.owner = None
                    if name not in used:
                        os.close(self._slots.pop(name).descriptor)

    def _make_image(self, message: Message) -> None:
        slot, version = message["slot"], (message["round"], message["step"])
        with self._lock:
            table, descriptor = message["table"].encode(), self._slots[slot].descriptor
            self._images[slot] = Image(slot, version, message["rank"], True, table, descriptor, message["nbytes"])
            self._drop_images_before((message["before"][0], message["before"][1]))

    def _drop_images_before(self, version: Version) -> None:
        """Drop images that are older than a version that all ranks hold."""
        self._drop_images([image for image in self._images.values() if image.version < version])

    def _drop_images(self, images: Sequence[Image]) -> None:
        for image in images:
            del self._images[image.name]
            if not image.own:
                os.close(image.descriptor)
            elif self._slots[image.name].owner is None:
                os.close(self._slots.pop(image.name).descriptor)

    # Requests from the network.

    def _serve(self, connection: socketserver.StreamRequestHandler) -> None:
        with suppress(OSError, ValueError, KeyError):
            while line := connection.rfile.readline(_LONGEST_LINE):
                message = json.loads(line)
                self.asked_at = time.monotonic()
                if not (self.token and hmac.compare_digest(message["token"], self.token)):
                    return
                self._reply(connection, message)

    def _reply(self, connection: socketserver.StreamRequestHandler, message: Message) -> None:
        op = message["op"]
        if op == "list":
            with self._lock:
                found = [
                    {"image": one.name, "version": one.version, "rank": one.rank, "nbytes": one.nbytes, "own": one.own}
                    for one in self._images.values()
                ]
            _write_line(connection, {"images": found})
        elif op == "push":
            self._take_copy(connection, message)
        else:
            self._send_image(connection, message)

    def _send_image(self, connection: socketserver.StreamRequestHandler, message: Message) -> None:
        """Send a table, or bytes of an image; answers nbytes -1 if the image no longer exists."""
        with self._lock:
            image = self._images.get(message["image"])
            descriptor = None if image is None else os.dup(image.descriptor)
        if image is None or descriptor is None:
            _write_line(connection, {"nbytes": -1})
            return
        try:
            if message["op"] == "table":
                _write_line(connection, {"nbytes": len(image.table)})
                connection.wfile.write(image.table)
                return
            at, end = message["at"], min(message["at"] + message["nbytes"], image.nbytes)
            _write_line(connection, {"nbytes": end - at})
            connection.wfile.flush()
            while at < end:
                at += os.sendfile(connection.connection.fileno(), descriptor, at, end - at)
        finally:
            os.close(descriptor)

    def _take_copy(self, connection: socketserver.StreamRequestHandler, message: Message) -> None:
        """Receive a copy of another node's image, which becomes an image when all of it has arrived."""
        table = connection.rfile.read(message["table_nbytes"])
        nbytes, at = message["nbytes"], 0
        descriptor = os.memfd_create("zeroshard-copy", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            while at < nbytes:
                data = connection.rfile.read(min(_CHUNK, nbytes - at))
                if not data:
                    raise OSError("the other end has closed during a copy")
                at += os.pwrite(descriptor, data, at)
        except OSError:
            os.close(descriptor)
            raise
        version = (message["version"][0], message["version"][1])
        with self._lock:
            self._count += 1
            name = f"copy-{self._count}"
            self._images[name] = Image(name, version, message["rank"], False, table, descriptor, nbytes)
            self._drop_images_before((message["before"][0], message["before"][1]))
        _write_line(connection, {"nbytes": nbytes})


def _write_line(connection: socketserver.StreamRequestHandler, message: Message) -> None:
    connection.wfile.write(json.dumps(message).encode() + b"\n")

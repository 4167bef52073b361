"""Memory of a rank that outlives its process, and connections to the memory servers of its own and of other nodes.

    NodeMemory     this rank's slots, two pieces of anonymous memory (memfd); the node holds them open, too
    MemoryClient   a connection to the memory server of a node: lists and reads the images that it holds

`launch/elastic/memory_server.py` says what they hold, and why.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.elastic.place import connect_node

Version = tuple[int, int]
Address = tuple[str, int]
_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 20.0


@dataclass
class Slot:
    """Memory of this process that its node holds open.

    Attributes:
        name: the slot's name at the node.
        values: its bytes, uint8.
        version: version of the image that it holds; None while it is written.
    """

    name: str
    descriptor: int
    memory: mmap.mmap
    values: torch.Tensor
    version: Version | None = None


class NodeMemory:
    """The slots of this rank, and the connection to its node. Methods raise OSError if the node has ended."""

    def __init__(self) -> None:
        self._node = connect_node()
        self._lines = self._node.makefile("rb")
        self._slots: list[Slot] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.values.numel() for slot in self._slots)

    def take(self, nbytes: int, keep: Version | None) -> Slot:
        """A slot of so many bytes to write to; not the slot of `keep`, the newest version that all ranks hold."""
        nbytes = max(nbytes, 1)
        for slot in self._slots:
            if slot.version is None or slot.version != keep:
                other = slot.values.numel() != nbytes
                self._drop(slot, ends=other)
                if not other:
                    return slot
                os.close(slot.descriptor)
                self._slots.remove(slot)
                break
        return self._make(nbytes)

    def hold(self, slot: Slot, version: Version, rank: int, table: str, before: Version) -> None:
        """Declare the slot this rank's image of `version`; the node may drop images older than `before`.

        Args:
            table: which tensors the bytes are, and their checksums, as text.
        """
        message = {
            "op": "hold",
            "slot": slot.name,
            "round": version[0],
            "step": version[1],
            "rank": rank,
            "table": table,
            "nbytes": slot.values.numel(),
            "before": before,
        }
        self._ask(message)
        slot.version = version

    def close(self) -> None:
        """Close the connection and this process's descriptors; the node keeps the images."""
        self._lines.close()
        self._node.close()
        for slot in self._slots:
            os.close(slot.descriptor)
        self._slots.clear()

    def _make(self, nbytes: int) -> Slot:
        descriptor = os.memfd_create("zeroshard-state", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        memory = mmap.mmap(descriptor, nbytes)
        slot = Slot(secrets.token_hex(8), descriptor, memory, torch.frombuffer(memory, dtype=torch.uint8))
        self._ask({"op": "slot", "slot": slot.name, "nbytes": nbytes}, descriptor)
        self._slots.append(slot)
        return slot

    def _drop(self, slot: Slot, *, ends: bool) -> None:
        slot.version = None
        self._ask({"op": "drop", "slot": slot.name, "ends": ends})

    def _ask(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        if descriptor is None:
            self._node.sendall(line)
        else:
            socket.send_fds(self._node, [line], [descriptor])
        if not self._lines.readline():
            raise OSError("the node has ended")


class MemoryClient:
    """A connection to the memory server of a node. Methods raise OSError if that has ended or does not answer."""

    def __init__(self, address: Address, token: str) -> None:
        self._token = token
        self._socket = socket.create_connection(address, _CONNECT_SECONDS)
        self._socket.settimeout(_ANSWER_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._socket.makefile("rb")

    def images(self) -> list[dict[str, Any]]:
        """The images that it holds, each with image (a name), version, rank, nbytes and own."""
        return self._ask({"op": "list"})["images"]

    def table(self, image: str) -> bytes:
        """The table of an image. Raises LookupError if the image no longer exists."""
        nbytes = self._ask({"op": "table", "image": image})["nbytes"]
        if nbytes < 0:
            raise LookupError(image)
        return self._exactly(nbytes)

    def read_into(self, image: str, at: int, out: memoryview) -> None:
        """Read into `out` from byte `at` on. Raises LookupError if the image, or that part of it, does not exist."""
        nbytes = self._ask({"op": "read", "image": image, "at": at, "nbytes": len(out)})["nbytes"]
        if nbytes != len(out):
            raise LookupError(image)
        done = 0
        while done < nbytes:
            count = self._stream.readinto(out[done:])  # pyright: ignore[reportAttributeAccessIssue]  (a BufferedReader)
            if not count:
                raise OSError("the memory server has closed during an answer")
            done += count

    def push(self, slot: Slot, version: Version, rank: int, table: bytes, before: Version) -> None:
        """Send it a copy of this rank's image; arguments as in `NodeMemory.hold`."""
        nbytes = slot.values.numel()
        head = {
            "op": "push",
            "version": version,
            "rank": rank,
            "nbytes": nbytes,
            "table_nbytes": len(table),
            "before": before,
            "token": self._token,
        }
        self._socket.sendall(json.dumps(head).encode() + b"\n" + table)
        at = 0
        while at < nbytes:
            at += os.sendfile(self._socket.fileno(), slot.descriptor, at, nbytes - at)
        if not self._stream.readline():
            raise OSError("the memory server has closed during a copy")

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._socket.sendall(json.dumps({**message, "token": self._token}).encode() + b"\n")
        line = self._stream.readline()
        if not line:
            raise OSError("the memory server has closed the connection")
        return json.loads(line)

    def _exactly(self, nbytes: int) -> bytes:
        data = self._stream.read(nbytes)
        if len(data) != nbytes:
            raise OSError("the memory server has closed during an answer")
        return data

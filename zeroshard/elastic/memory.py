"""A rank's own memory that outlives it, and its words with the keepers of its node and of others.

    Slots      two pieces of memory without a name; the node holds them open too
    KeeperLink one connection to a keeper: what it holds, and any bytes of it

What they hold and why is in `launch/elastic/keeper.py`.
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
        version: of the image that it holds; None while it is written.
    """

    name: str
    descriptor: int
    memory: mmap.mmap
    values: torch.Tensor
    version: Version | None = None


class NodeMemory:
    """This rank's memory at its node."""

    def __init__(self) -> None:
        self._node = connect_node()
        self._lines = self._node.makefile("rb")
        self._slots: list[Slot] = []

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return sum(slot.values.numel() for slot in self._slots)

    def take(self, nbytes: int, keep: Version | None) -> Slot:
        """A slot of so many bytes to write to, which is none of `keep`, the newest version that all ranks hold."""
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
        """From now on the slot is this rank's image of a step; all that is older than `before` may go."""
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
        """Let go of it; the node keeps what it holds."""
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


class KeeperLink:
    """A connection to the keeper of some node. Methods raise OSError where it is gone."""

    def __init__(self, address: Address, token: str) -> None:
        self._token = token
        self._socket = socket.create_connection(address, _CONNECT_SECONDS)
        self._socket.settimeout(_ANSWER_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._socket.makefile("rb")

    def images(self) -> list[dict[str, Any]]:
        """What it holds: image, version, rank, nbytes, own."""
        return self._ask({"op": "list"})["images"]

    def table(self, image: str) -> bytes:
        """The table of an image. Raises LookupError where that is not there any more."""
        nbytes = self._ask({"op": "table", "image": image})["nbytes"]
        if nbytes < 0:
            raise LookupError(image)
        return self._exactly(nbytes)

    def read_into(self, image: str, at: int, out: memoryview) -> None:
        """Fill `out` from byte `at` on. Raises LookupError where the image, or that part of it, is not there."""
        nbytes = self._ask({"op": "read", "image": image, "at": at, "nbytes": len(out)})["nbytes"]
        if nbytes != len(out):
            raise LookupError(image)
        done = 0
        while done < nbytes:
            count = self._stream.readinto(out[done:])  # pyright: ignore[reportAttributeAccessIssue]  (a BufferedReader)
            if not count:
                raise OSError("the keeper has closed amid an answer")
            done += count

    def push(self, slot: Slot, version: Version, rank: int, table: bytes, before: Version) -> None:
        """Let it have a copy of this rank's image."""
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
            raise OSError("the keeper has closed amid a copy")

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._socket.sendall(json.dumps({**message, "token": self._token}).encode() + b"\n")
        line = self._stream.readline()
        if not line:
            raise OSError("the keeper has closed the connection")
        return json.loads(line)

    def _exactly(self, nbytes: int) -> bytes:
        data = self._stream.read(nbytes)
        if len(data) != nbytes:
            raise OSError("the keeper has closed amid an answer")
        return data

"""The nodes of a job without a launcher above them: they hold a connection to node 0, which judges what came first.

    node 1 --hello, died, cause, clear, bye--> node 0's judge --stop, cause--> every node
    node 2 ----------- end of file ----------> (its agent was killed)

torchrun's static rendezvous leaves nodes alone: when one dies the others wait in their collectives until these time
out. Here the end of a connection, or 30 s without an answer to the kernel's keep-alives, ends the job on all nodes.
The address of the judge is in the store through which the agents meet, so no further port has to be opened by hand.
Polling that store was rejected: it can't tell a busy node from a dead one in less than half a minute.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from zeroshard.cluster import DEFAULT_PORT
from zeroshard.launch.arbiter import Arbiter
from zeroshard.launch.frames import Message
from zeroshard.launch.job import Job
from zeroshard.launch.runner import PREEMPTED
from zeroshard.launch.voice import SAVED, SAVING, say

_KEY = "zeroshard/line"
# How long a node whose ranks have failed waits to hear whether another came first.
_VERDICT_SECONDS = 15.0
_CONNECT_SECONDS = 30.0
_GOODBYE_SECONDS = 1.0
_LONGEST = 1 << 20  # bytes of a message


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # Linux; elsewhere the kernel's own times hold
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def _send(connection: socket.socket, message: Message) -> None:
    with suppress(OSError):  # who is gone is noticed by the reader
        connection.sendall(json.dumps(message).encode() + b"\n")


class Judge:
    """Node 0's end: a thread that hears all nodes and tells all of them the first trouble and its cause."""

    def __init__(self, nnodes: int) -> None:
        # Whoever can read the store belongs to the job; a port scanner does not.
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("", 0), backlog=nnodes)
        self._peers: dict[socket.socket, _Peer] = {}
        self._arbiter = Arbiter(nnodes)
        self._stopped = self._told = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="judge", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Port and token, for the store."""
        return f"{self._listener.getsockname()[1]} {self._token}"

    def close(self, well: bool) -> None:
        """Hear the others out if there is trouble, then end; `well` if this node's ranks ended well."""
        deadline = time.monotonic() + _VERDICT_SECONDS
        while self._arbiter.troubled and len(self._peers) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        if well:
            for connection in list(self._peers):
                _send(connection, {"kind": "bye"})
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(0.1 if self._arbiter.troubled else 5.0):
                    if key.fileobj is self._woken:
                        self._woken.close()
                        self._hang_up()
                        return
                    if key.fileobj is self._listener:
                        connection, address = self._listener.accept()
                        _keep_alive(connection)
                        self._peers[connection] = _Peer(address[0])
                        selector.register(connection, selectors.EVENT_READ)
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        self._read(key.fileobj, selector)
                self._tell()

    def _hang_up(self) -> None:
        """Say that nothing follows, and wait for the same: a close with unread words would undo what was sent."""
        deadline = time.monotonic() + _GOODBYE_SECONDS
        for connection in self._peers:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        for connection in self._peers:
            with suppress(OSError):
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                while connection.recv(65536):
                    pass
            connection.close()

    def _read(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        peer = self._peers[connection]
        messages, open_ = peer.read(connection)
        now = time.monotonic()
        for message in messages:
            match message["kind"]:
                case "hello" if message.get("token") == self._token:
                    peer.node, peer.name = message["node"], message["host"]
                case _ if peer.node < 0:
                    open_ = False
                case "died":
                    self._arbiter.died(peer.node, now, message["violent"])
                case "cause":
                    self._arbiter.cause(peer.node, message["text"])
                case "gone":
                    self._arbiter.gone(peer.node, message["text"], now)
                case "clear":
                    self._arbiter.clear(peer.node)
                case "bye":
                    peer.left = True
                    self._arbiter.clear(peer.node)
        if not open_:
            selector.unregister(connection)
            del self._peers[connection]
            connection.close()
            if peer.node >= 0 and not peer.left:
                text = f"zeroshard: node {peer.node} (host {peer.name}) was lost first: its agent ended without a word"
                self._arbiter.gone(peer.node, text, now)

    def _tell(self) -> None:
        """First that it is over, then why; a node's own cause is not told to it again."""
        if self._arbiter.troubled and not self._stopped:
            verdict = self._arbiter.verdict(time.monotonic(), final=False)
            if verdict is None and self._arbiter.decided is None:
                return
            self._stopped = True
            for connection in list(self._peers):
                _send(connection, {"kind": "stop", "node": self._arbiter.decided})
        if self._stopped and not self._told:
            verdict = self._arbiter.verdict(time.monotonic(), final=False)
            if verdict is not None:
                self._told = True
                for connection in list(self._peers):
                    _send(connection, {"kind": "cause", "node": self._arbiter.decided, "text": verdict})


@dataclass
class _Peer:
    name: str
    node: int = -1
    left: bool = False
    received: bytes = b""

    def read(self, connection: socket.socket) -> tuple[list[Message], bool]:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""  # reset, or the keep-alives went unanswered
        *lines, self.received = (self.received + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
            known = all(isinstance(message, dict) and "kind" in message for message in messages)
        except ValueError:
            known, messages = False, []
        # Not one of ours: it is not heard any further.
        return (messages, bool(data)) if known and len(self.received) <= _LONGEST else ([], False)


@dataclass
class Line:
    """A node's voice among its peers. Its thread hears of others' trouble and ends this node's agent with SIGTERM."""

    job: Job
    _connection: socket.socket | None = None
    _own: str | None = None
    _first: Message | None = None
    _stopped: bool = False
    _left: bool = False
    _well: bool = False
    _heard: threading.Event = field(default_factory=threading.Event)
    _ready: threading.Event = field(default_factory=threading.Event)

    def ready(self) -> None:
        """Wait for the line, or the death of this agent would go unheard. Node 0's starts with the agent's store."""
        if self.job.node_rank > 0:
            self._ready.wait(self.job.rendezvous_timeout)

    def died(self, rank: int, violent: bool) -> None:
        """Tell the judge at once: the order of arrival counts."""
        self._say({"kind": "died", "rank": rank, "violent": violent})

    def cause(self, text: str) -> None:
        """Tell why; it is shown here when the judge has spoken, in `ended`."""
        self._own = text
        self._say({"kind": "cause", "text": text})

    def stopping(self, number: signal.Signals, clear: bool) -> None:
        """Unless it is the judge's doing, or a rank has failed before, this node is the first to go."""
        if self._stopped and clear:
            self._say({"kind": "clear"})
        if not self._stopped and clear:
            host = self.job.node_name or socket.gethostname()
            text = f"zeroshard: node {self.job.node_rank} (host {host}) was lost first: its agent got {number.name}"
            self._say({"kind": "gone", "text": text})

    def stopped(self, number: signal.Signals, failed: int | None) -> int:
        """By a peer's trouble, or by a signal to this node."""
        if not self._stopped:
            self._leave()
            say(f"zeroshard: {number.name} received, all ranks of this node ended")
            return 128 + number
        self._say({"kind": "clear"})
        self._heard.wait(_VERDICT_SECONDS)
        say(f"{self._verdict()}\nzeroshard: ended the ranks of this node")
        return 1 if failed is None else failed

    def may_save(self) -> bool:
        """Not when it is the judge who ends this node."""
        return not self._stopped

    def saving(self, number: signal.Signals) -> None:
        """The ranks of the other nodes hear of it from those of this one."""
        say(SAVING.format(number.name))

    def preempted(self) -> int:
        """To the others this node has ended well."""
        say(SAVED)
        return self.ended(0, []) or PREEMPTED

    def ended(self, status: int, consequences: list[str]) -> int:
        """Tell what came first in the job, then what of it was here."""
        if status == 0:
            self._well = True
            self._say({"kind": "bye"})
            self._leave()
            return 0
        if self._connection is not None:
            self._heard.wait(_VERDICT_SECONDS)
        lines = [self._verdict(), *consequences]
        if self._first is not None and self._first["node"] != self.job.node_rank and self._own is not None:
            lines.insert(1, "zeroshard: then" + self._own.partition("\n")[0].removeprefix("zeroshard:"))
        say("\n".join(line for line in lines if line))
        return status

    @property
    def well(self) -> bool:
        """Whether this node's ranks have all ended well."""
        return self._well

    def _verdict(self) -> str:
        if self._first is None or self._first["node"] == self.job.node_rank:
            return self._own or (self._first["text"] if self._first else "zeroshard: another node ended first")
        return self._first["text"]

    def _say(self, message: Message) -> None:
        # A rank can fail before the line is there: it is waited for as long as it takes to be told of it.
        self._ready.wait(_VERDICT_SECONDS)
        if self._connection is not None:
            _send(self._connection, message)

    def _leave(self) -> None:
        self._left = True
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)

    def through(self) -> None:
        """The agent has ended, whatever came of it: what is heard from now on, as the judge's own end, ends nothing."""
        self._left = True

    def listen(self, judge: Judge | None) -> None:
        """The thread: find the judge through the store of the rendezvous, then hear it until the end."""
        job = self.job
        assert job.master_addr is not None
        try:
            store = dist.TCPStore(
                job.master_addr,
                job.master_port or DEFAULT_PORT,
                is_master=False,
                timeout=timedelta(seconds=job.rendezvous_timeout),
            )
            if judge is not None:
                store.set(_KEY, judge.address)
            port, token = store.get(_KEY).decode().split()
            connection = socket.create_connection((job.master_addr, int(port)), timeout=_CONNECT_SECONDS)
        except (dist.DistError, OSError):
            self._ready.set()
            return  # no rendezvous: the agent says so
        connection.settimeout(None)
        _keep_alive(connection)
        host = job.node_name or socket.gethostname()
        _send(connection, {"kind": "hello", "token": token, "node": job.node_rank, "host": host})
        self._connection = connection
        self._ready.set()
        self._hear(connection)

    def _hear(self, connection: socket.socket) -> None:
        judge = _Peer("node 0")
        open_ = True
        while open_:
            messages, open_ = judge.read(connection)
            for message in messages:
                if message["kind"] == "cause":
                    self._first = message
                    self._heard.set()
                elif message["kind"] == "bye":
                    self._left = True  # node 0 is through, and nobody is left to judge
                elif message["node"] != self.job.node_rank:
                    self._end()
        connection.close()
        if not self._left:
            lost = f"zeroshard: node 0 (host {self.job.master_addr}) was lost first: its agent ended without a word"
            self._first = self._first or {"node": 0, "text": lost}
            self._heard.set()
            self._end()

    def _end(self) -> None:
        if not self._left and not self._stopped and self._own is None:
            self._stopped = True
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def joined(job: Job) -> Iterator[Line]:
    """A line to the other nodes for as long as the agent runs; node 0 brings the judge."""
    judge = Judge(job.nnodes) if job.node_rank == 0 else None
    line = Line(job)
    threading.Thread(target=line.listen, args=(judge,), name="line", daemon=True).start()
    try:
        yield line
    finally:
        line.through()
        if judge is not None:
            judge.close(line.well)

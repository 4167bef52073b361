"""The launcher of a job on several hosts: starts the nodes, shows their output, and ends all when one is lost.

                 .-- stdin: variables, job, heartbeats, stop ---> node 0
    launcher ----|                                                (guard, agent, ranks)
                 '-- stdout, stderr with messages <--------------

    CONNECTING --hello--> READY --all ready: job--> RUNNING --left, end of its ssh--> ENDED

No rank is started before every host has answered, so if a host is unreachable nothing has to be ended. When a rank
fails, the nodes determine the first failure and end by themselves (peers.py), as nodes without a launcher do. A lost
host is noticed first by the launcher, since its ssh ends.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from types import FrameType

import zeroshard
from zeroshard.errors import UsageError
from zeroshard.launch.channel import Channel
from zeroshard.launch.hosts import Host
from zeroshard.launch.job import Job
from zeroshard.launch.messages import SAVED, SAVING, Message, say
from zeroshard.launch.runner import PREEMPTED

_HEARTBEAT_SECONDS = 5.0
_HELLO_SECONDS = 120.0
# Seconds that nodes may take to report and to end by themselves after one of them has left with a failure.
_PEERS_SECONDS = 3.0
# Agents give their ranks 10 seconds; then nodes get SIGKILL, then the ssh processes are killed.
_STOP_SECONDS = 15.0
_KILL_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class State(Enum):
    """The state of a node in the launcher."""

    CONNECTING = "connecting"
    READY = "ready"
    RUNNING = "running"
    ENDED = "ended"


@dataclass
class Node:
    """A host of the job.

    Attributes:
        hello: the node's first message; None before it.
        status: its exit status, from its last message; None before it.
        left_at: when that message came.
        saving: whether its ranks were asked to save.
    """

    host: Host
    job: Job
    channel: Channel
    state: State = State.CONNECTING
    hello: Message | None = None
    status: int | None = None
    left_at: float = 0.0
    saving: bool = False

    def has_failed(self) -> bool:
        """Whether the node has left with a failure."""
        return self.status not in (None, 0, PREEMPTED)


@dataclass
class _Stop:
    """A stop of the job in progress.

    Attributes:
        number: the user's signal; None if a lost or failed host is the reason.
        since: when it began.
        killed: whether nodes have got SIGKILL.
        again: whether a second signal came.
    """

    number: signal.Signals | None
    since: float
    killed: bool = False
    again: bool = False


class RemoteJob:
    """A job on several hosts."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = list(nodes)
        self._stop: _Stop | None = None
        self._first: Node | None = None
        self._refusal: str | None = None
        self._began = self._heartbeat_at = time.monotonic()
        self._signals: list[signal.Signals] = []

    def run(self) -> int:
        """Run until all nodes have ended; returns the exit status. Raises UsageError if a host can't be reached."""
        with selectors.DefaultSelector() as selector, _Wakeup(self._signals) as wakeup:
            selector.register(wakeup, selectors.EVENT_READ)
            for node in self._nodes:
                for stream in node.channel.streams():
                    selector.register(stream, selectors.EVENT_READ, node)
            while any(node.state is not State.ENDED for node in self._nodes):
                for key, _ in selector.select(timeout=0.1 if self._stop else 1.0):
                    if not isinstance(key.data, Node):
                        wakeup.recv(64)
                        continue
                    messages, open_ = key.data.channel.read(key.fd)
                    for message in messages:
                        self._on_message(key.data, message)
                    if not open_:
                        selector.unregister(key.fd)
                self._on_tick(time.monotonic())
        return self._conclude()

    def _on_message(self, node: Node, message: Message) -> None:
        match message["kind"]:
            case "hello":
                node.hello, node.state = message, State.READY
                if all(other.state is State.READY for other in self._nodes):
                    self._start()
            case "first":
                self._first = self._first or node
            case "saving":
                if not any(other.saving for other in self._nodes):
                    say(SAVING)
                node.saving = True
            case "killed":
                self._on_lost(node, f"the agent on it was killed by {message['signal']}")
            case "left":
                node.status, node.left_at = message["status"], time.monotonic()
            case other:
                raise AssertionError(other)

    def _start(self) -> None:
        """All hosts have answered: send each its job."""
        first = self._nodes[0]
        assert first.hello is not None
        for node in self._nodes:
            assert node.hello is not None
            if node.hello["version"] != zeroshard.__version__:
                return self._refuse(
                    f"host {node.host.name} has zeroshard {node.hello['version']}, this one {zeroshard.__version__}; "
                    "install the same on all"
                )
        try:
            address = first.job.master_addr or _address(first, len(self._nodes))
        except UsageError as error:
            return self._refuse(str(error))
        port = first.job.master_port or int(first.hello["port"])
        for node in self._nodes:
            node.job = replace(node.job, master_addr=address, master_port=port)
            node.state = State.RUNNING
            node.channel.write(node.job.to_json())
        return None

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        self._begin_stop(None)

    def _on_tick(self, now: float) -> None:
        while self._signals:
            self._interrupt(self._signals.pop(0))
        for node in self._nodes:
            if node.state is not State.ENDED:
                self._check_end(node, now)
        if self._refusal is not None and all(node.state is not State.CONNECTING for node in self._nodes):
            self._begin_stop(None)
        # Nodes whose ranks are saving need heartbeats for as long as that takes. A node that waits for its job gets
        # none, since it would read the heartbeat as the job.
        if (self._stop is None or self._is_saving()) and now - self._heartbeat_at >= _HEARTBEAT_SECONDS:
            self._heartbeat_at = now
            for node in self._nodes:
                if node.state is State.RUNNING:
                    node.channel.write("heartbeat")
        if self._stop is not None:
            self._enforce_stop(self._stop, now)
        elif any(node.has_failed() and now - node.left_at > _PEERS_SECONDS for node in self._nodes):
            self._begin_stop(None)
        elif now - self._began > _HELLO_SECONDS:
            silent = [node.host.name for node in self._nodes if node.state is State.CONNECTING]
            if silent:
                self._refuse(f"no answer within {_HELLO_SECONDS:.0f} s from {', '.join(silent)}")

    def _check_end(self, node: Node, now: float) -> None:
        """Whether a node has ended: its ssh has, or it said so some time ago, since a process may keep the ssh open."""
        if not node.channel.has_ended() and (node.status is None or now - node.left_at < _CLOSE_SECONDS):
            return
        was_saving = self._is_saving()
        before, node.state = node.state, State.ENDED
        if was_saving and node.status != PREEMPTED:
            self._interrupt(signal.SIGTERM)  # it could not save, and the others would wait for it
        if node.status is None and before is State.RUNNING:
            self._on_lost(node, "the connection to it ended")
        elif node.status is None and self._stop is None:
            self._refusal = self._refusal or ""  # wait for the other hosts, too: several may be unreachable

    def _on_lost(self, node: Node, how: str) -> None:
        """A node was lost: report it if it is the first one and the launcher is not stopping, and stop the job."""
        if self._first is None and self._stop is None:
            self._first = node
            say(f"zeroshard: host {node.host.name} was lost first: {how}")
        self._begin_stop(None)

    def _begin_stop(self, number: signal.Signals | None) -> None:
        if self._stop is None:
            self._stop = _Stop(number, time.monotonic())
            self._tell_to_stop(number or signal.SIGTERM)

    def _tell_to_stop(self, number: signal.Signals) -> None:
        for node in self._nodes:
            if node.state is State.RUNNING:
                node.channel.write(f"stop {number.name}")
            elif node.state is not State.ENDED:
                node.channel.close_input()  # it waits for its job, and ends when its input does

    def _interrupt(self, number: signal.Signals) -> None:
        if self._stop is None:
            self._begin_stop(number)
            return
        self._stop.number = self._stop.number or number  # a second Ctrl-C
        if self._is_saving():
            self._stop.since = time.monotonic()
        self._stop.again = True
        self._tell_to_stop(number)

    def _is_saving(self) -> bool:
        """Whether all running nodes are saving, since the user has sent SIGTERM once."""
        stop = self._stop
        asked = stop is not None and stop.number is signal.SIGTERM and not stop.again
        running = [node for node in self._nodes if node.state is State.RUNNING]
        return asked and bool(running) and all(node.saving for node in running)

    def _enforce_stop(self, stop: _Stop, now: float) -> None:
        """Send SIGKILL to nodes that do not end in time, and kill the ssh processes after that."""
        if self._is_saving():
            return
        if now - stop.since > _STOP_SECONDS and not stop.killed:
            stop.killed = True
            self._tell_to_stop(signal.SIGKILL)
        connecting = [node for node in self._nodes if node.state is State.CONNECTING]
        for node in self._nodes if now - stop.since > _STOP_SECONDS + _KILL_SECONDS else connecting:
            node.channel.kill()

    def _conclude(self) -> int:
        if self._refusal is not None:
            raise UsageError(self._refusal or _unreachable(self._nodes))
        statuses = [node.status for node in self._nodes]
        if set(statuses) == {PREEMPTED}:
            say(SAVED)
            return PREEMPTED
        if self._stop is not None and self._stop.number is not None:
            say(f"zeroshard: {self._stop.number.name} received, all hosts ended")
            return 128 + self._stop.number
        if not any(status != 0 for status in statuses):
            return 0
        say("zeroshard: all hosts ended")
        return (self._first is not None and self._first.status) or next(filter(None, statuses), 1)


def _unreachable(nodes: Sequence[Node]) -> str:
    failed = [node for node in nodes if node.hello is None]
    lines = [
        f"host {node.host.name}{f' (hostfile line {node.host.line})' if node.host.line else ''} can't be used: "
        f"{node.channel.last_line or 'ssh ended without a message'}"
        for node in failed
    ]
    return (
        lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} hosts can't be used:", *(f"  {x}" for x in lines)])
    )


def _address(first: Node, hosts: int) -> str:
    """The address of node 0 for the other nodes: that at which ssh reached it, unless it is a loopback address."""
    assert first.hello is not None
    reached = first.hello["address"]
    for candidate in (reached, first.host.name):
        if candidate is not None and (hosts == 1 or not _is_loopback(candidate)):
            return candidate
    raise UsageError(
        f"the other hosts can't reach {first.host.name} under that name; give the address of the first host as "
        "--master-addr, or write its real name in the hostfile"
    )


def _is_loopback(name: str) -> bool:
    try:
        return socket.gethostbyname(name).startswith("127.") if ":" not in name else name == "::1"
    except OSError:
        return False  # maybe a name of ssh's configuration; other nodes report an error if they can't resolve it


class _Wakeup:
    """Makes a socket readable when a signal comes, so that a selector can wait for signals, too."""

    def __init__(self, received: list[signal.Signals]) -> None:
        self._received = received
        self._read, self._write = socket.socketpair()

    def __enter__(self) -> socket.socket:
        self._write.setblocking(False)
        self._before = {number: signal.signal(number, self._handle) for number in _STOPS}
        return self._read

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))
        with suppress(BlockingIOError):
            self._write.send(b"!")

"""The launcher's end of a job on several hosts: starts the nodes, shows their output, ends all when one fails.

                 .-- stdin: variables, job, beats, stop ---> node 0
    launcher ----|                                           (guard, agent, ranks)
                 '-- stdout, stderr with frames <-----------

    CONNECTING --hello--> READY --all ready: job--> RUNNING --left, end of its ssh--> ENDED

No rank is started before every host has answered, so an unreachable host is one sentence and nothing has to be taken
back. One loop over all pipes, no thread: the order in which things are told is the order in which they were heard.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from types import FrameType

import zeroshard
from zeroshard.errors import UsageError
from zeroshard.launch.arbiter import Arbiter
from zeroshard.launch.channel import Channel
from zeroshard.launch.frames import Message
from zeroshard.launch.hosts import Host
from zeroshard.launch.job import Job
from zeroshard.launch.runner import PREEMPTED
from zeroshard.launch.voice import SAVED, SAVING, say

_BEAT_SECONDS = 5.0
_HELLO_SECONDS = 120.0
# Agents give their ranks 10 seconds; then nodes are ended outright, then the ssh's to them.
_STOP_SECONDS = 15.0
_KILL_SECONDS = 5.0
_LINGER_SECONDS = 2.0
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class State(Enum):
    """Of a node, as the launcher sees it."""

    CONNECTING = "connecting"
    READY = "ready"
    RUNNING = "running"
    ENDED = "ended"


@dataclass
class Node:
    """A host of the job. `status` is what it said at its end, `lines` the consequences it told."""

    host: Host
    job: Job
    channel: Channel
    state: State = State.CONNECTING
    hello: Message | None = None
    status: int | None = None
    lines: list[str] = field(default_factory=list)
    left_at: float | None = None
    told_to_stop: bool = False
    saving: bool = False


@dataclass
class _Stop:
    """The way down: a signal of the user's, or a failure (None)."""

    number: signal.Signals | None
    since: float
    killed: bool = False
    again: bool = False


class RemoteJob:
    """A job over hosts; `run` returns the exit status when nothing of it is left."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = list(nodes)
        self._arbiter = Arbiter(len(self._nodes))
        self._stop: _Stop | None = None
        self._told = False
        self._refusal: str | None = None
        self._began = time.monotonic()
        self._beaten = self._began
        self._signals: list[signal.Signals] = []
        self._asked = False

    def run(self) -> int:
        """Until all nodes have ended. UsageError if one could not be reached or refused the job."""
        with selectors.DefaultSelector() as selector, _Wakeup(self._signals) as wakeup:
            selector.register(wakeup, selectors.EVENT_READ)
            for node in self._nodes:
                for stream in node.channel.streams():
                    selector.register(stream, selectors.EVENT_READ, node)
            while any(node.state is not State.ENDED for node in self._nodes):
                for key, _ in selector.select(timeout=0.1 if self._stop or self._arbiter.troubled else 1.0):
                    if isinstance(key.data, Node):
                        self._read(key.data, key.fd, selector)
                    else:
                        wakeup.recv(64)
                self._tick()
        return self._conclude()

    def _read(self, node: Node, descriptor: int, selector: selectors.BaseSelector) -> None:
        messages, open_ = node.channel.read(descriptor)
        for message in messages:
            self._hear(node, message)
        if not open_:
            selector.unregister(descriptor)
            node.channel.close_stream(descriptor)

    def _hear(self, node: Node, message: Message) -> None:
        now = time.monotonic()
        match message["kind"]:
            case "hello":
                node.hello, node.state, node.channel.shown = message, State.READY, True
                if all(other.state is State.READY for other in self._nodes):
                    self._start()
            case "died":
                self._arbiter.died(node.job.node_rank, now, message["violent"])
                self._stop_others(node)
            case "cause":
                self._arbiter.cause(node.job.node_rank, message["text"])
            case "ended":
                node.lines = message["lines"]
            case "refused":
                if self._refusal is None:
                    self._refusal = f"host {node.host.name}: {message['text']}"
                self._begin_stop(None)
            case "stopping" if message["orphan"] or not node.told_to_stop:
                how = "its guard process was killed" if message["orphan"] else f"its agent got {message['signal']}"
                self._lost(node, how)
            case "stopping":
                pass  # as it was told
            case "clear":
                self._arbiter.clear(node.job.node_rank)
            case "saving":
                node.saving = True
                if not self._asked:
                    self._asked = True
                    say(SAVING.format(message["signal"]))
            case "killed":
                self._lost(node, f"the agent on it was killed by {message['signal']}")
            case "left":
                node.status, node.left_at = message["status"], now
                self._arbiter.clear(node.job.node_rank)
            case other:
                raise AssertionError(other)

    def _start(self) -> None:
        """All hosts have answered: send each its job."""
        for node in self._nodes:
            assert node.hello is not None
            if node.hello["version"] != zeroshard.__version__:
                self._refusal = (
                    f"host {node.host.name} has zeroshard {node.hello['version']}, this one {zeroshard.__version__}; "
                    "install the same on all"
                )
                self._begin_stop(None)
                return
        first = self._nodes[0]
        assert first.hello is not None
        try:
            address = first.job.master_addr or _address(first, len(self._nodes))
        except UsageError as error:
            self._refusal = str(error)
            self._begin_stop(None)
            return
        port = first.job.master_port or int(first.hello["port"])
        for node in self._nodes:
            node.job = replace(node.job, master_addr=address, master_port=port)
            node.state = State.RUNNING
            node.channel.write(node.job.to_json())

    def _tick(self) -> None:
        now = time.monotonic()
        while self._signals:
            self._interrupted(self._signals.pop(0))
        for node in self._nodes:
            if node.state is not State.ENDED:
                self._check_end(node, now)
        if self._refusal is not None and all(node.state is not State.CONNECTING for node in self._nodes):
            self._begin_stop(None)
        # Nodes whose ranks save take as long as they take; they still want to hear that the launcher lives. One that
        # has not got its job would take a beat for it.
        if (self._stop is None or self._saving()) and now - self._beaten >= _BEAT_SECONDS:
            self._beaten = now
            for node in self._nodes:
                if node.state is State.RUNNING:
                    node.channel.write("beat")
        if self._stop is not None:
            self._press(self._stop, now)
        elif now - self._began > _HELLO_SECONDS:
            silent = [node for node in self._nodes if node.state is State.CONNECTING]
            if silent:
                self._refusal = f"{_names(silent)} did not answer within {_HELLO_SECONDS:.0f} s"
                self._begin_stop(None)
        self._tell(final=False)

    def _check_end(self, node: Node, now: float) -> None:
        """A node has ended when its ssh has, or soon after it said so: what a rank left may hold the ssh open."""
        code = node.channel.ended()
        if code is None and (node.left_at is None or now - node.left_at < _LINGER_SECONDS):
            return
        saving = self._saving()
        before, node.state = node.state, State.ENDED
        if saving and node.status != PREEMPTED:
            self._interrupted(signal.SIGTERM)  # it could not save: the others would wait for it
        if node.status is None:
            if before in (State.CONNECTING, State.READY):
                if self._stop is not None:
                    return
                self._refusal = self._refusal or ""  # the others are heard out first: several may be unreachable
            else:
                self._lost(node, "the connection to it ended")
        elif (
            node.status not in (0, PREEMPTED)
            and not self._arbiter.troubled
            and self._refusal is None
            and self._stop is None
        ):
            self._lost(node, f"its agent ended with status {node.status}")

    def _lost(self, node: Node, how: str) -> None:
        """What the launcher's own stop can't have done; the arbiter sees whether it came too late to be the cause."""
        if self._stop is None or not (self._stop.killed or self._stop.number):
            self._arbiter.gone(
                node.job.node_rank, f"zeroshard: host {node.host.name} was lost first: {how}", time.monotonic()
            )
            self._stop_others(node)

    def _stop_others(self, node: Node) -> None:
        """The node ends its own ranks, and tells more if it is not disturbed."""
        self._begin_stop(None, spare=node)

    def _begin_stop(self, number: signal.Signals | None, spare: Node | None = None) -> None:
        if self._stop is not None:
            return
        self._stop = _Stop(number, time.monotonic())
        for node in self._nodes:
            if node is not spare:
                self._send_stop(node, number or signal.SIGTERM)

    def _send_stop(self, node: Node, number: signal.Signals) -> None:
        node.told_to_stop = True
        if node.state is State.RUNNING:
            node.channel.write(f"stop {number.name}")
        elif node.state is not State.ENDED:
            node.channel.close_input()  # it waits for its job, and leaves when there is none

    def _interrupted(self, number: signal.Signals) -> None:
        if self._stop is None:
            self._begin_stop(number)
        else:  # a second Ctrl-C
            self._stop.number = self._stop.number or number
            if self._saving():
                self._stop.since = time.monotonic()
            self._stop.again = True
            for node in self._nodes:
                self._send_stop(node, number)

    def _saving(self) -> bool:
        """Whether all nodes that have not ended were asked, once, by the user, to save."""
        stop = self._stop
        asked = stop is not None and stop.number is signal.SIGTERM and not stop.again
        running = [node for node in self._nodes if node.state is State.RUNNING]
        return asked and bool(running) and all(node.saving for node in running)

    def _press(self, stop: _Stop, now: float) -> None:
        """A node that does not end when told to is ended; then the ssh to it."""
        if self._saving():
            return
        if now - stop.since > _STOP_SECONDS and not stop.killed:
            stop.killed = True
            for node in self._nodes:
                self._send_stop(node, signal.SIGKILL)
        connecting = [node for node in self._nodes if node.state is State.CONNECTING]
        for node in self._nodes if now - stop.since > _STOP_SECONDS + _KILL_SECONDS else connecting:
            node.channel.kill()

    def _tell(self, final: bool) -> None:
        """The cause, once, before anything that follows from it."""
        if self._told or self._refusal is not None or (self._stop is not None and self._stop.number is not None):
            return
        verdict = self._arbiter.verdict(time.monotonic(), final)
        if verdict is not None:
            self._told = True
            say(verdict)

    def _conclude(self) -> int:
        if self._refusal is not None:
            raise UsageError(self._refusal or _unreachable(self._nodes))
        if not self._arbiter.troubled and {node.status for node in self._nodes} == {PREEMPTED}:
            say(SAVED)
            return PREEMPTED
        if self._stop is not None and self._stop.number is not None:
            say(f"zeroshard: {self._stop.number.name} received, all hosts ended")
            return 128 + self._stop.number
        self._tell(final=True)
        for node in self._nodes:
            for line in node.lines:
                say(line)
        if not self._arbiter.troubled:
            return 0
        culprit = self._nodes[self._arbiter.decided or 0]
        others = len(self._nodes) - 1
        say(f"zeroshard: ended {others} other host{'s' if others > 1 else ''}")
        return culprit.status or 1


def _unreachable(nodes: Sequence[Node]) -> str:
    failed = [node for node in nodes if node.hello is None]
    lines = [
        f"host {node.host.name}{f' (hostfile line {node.host.line})' if node.host.line else ''} can't be used: "
        f"{node.channel.last_words() or 'it ended without a word'}"
        for node in failed
    ]
    return (
        lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} hosts can't be used:", *(f"  {x}" for x in lines)])
    )


def _names(nodes: Sequence[Node]) -> str:
    return ("host " if len(nodes) == 1 else "hosts ") + ", ".join(node.host.name for node in nodes)


def _address(first: Node, hosts: int) -> str:
    """Where the others find node 0: where its ssh came in, unless that is an address of that machine only."""
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
        return False  # known to ssh's configuration alone, perhaps; the others will say


class _Wakeup:
    """Signals as something to select on."""

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

"""Test hosts: network namespaces on one bridge, an sshd in each, and one namespace for the launcher.

    hub 10.77.0.1 --- bridge --- h1 10.77.0.11, sshd
     (launcher)             '--- h2 10.77.0.12, sshd

Each has its own addresses and ports, and the kernel lists the processes of each (`ip netns pids`), so that "nothing is
left running on any host" can be asked. Nothing outside of the namespaces is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.launch.launcher import environment

PORT = 2222


def why_not() -> str | None:
    """Why test hosts can't be made here; None if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, to make network namespaces"
    missing = [name for name in ("ip", "ssh", "ssh-keygen", "sshd") if _which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: openssh-server openssh-client iproute2)"
    made = subprocess.run(["ip", "netns", "add", f"zsprobe{os.getpid()}"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"the kernel lets nobody make network namespaces here ({made.stderr.strip()})"
    _ip("netns", "del", f"zsprobe{os.getpid()}")
    return None


def _which(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass(frozen=True)
class TestHosts:
    """`names` are the hosts' addresses, `arguments` what ssh needs to get in."""

    __test__ = False

    prefix: str
    directory: Path
    names: tuple[str, ...]

    def namespace(self, name: str) -> str:
        return f"{self.prefix}h{self.names.index(name)}"

    @property
    def ssh(self) -> list[str]:
        """Options of `zeroshard run` that make its ssh get in."""
        known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        return ["--ssh-port", str(PORT), "--launcher-args", f"-F none -i {self.directory}/key {known}"]

    def hostfile(self, directory: Path, slots: int = 1, extra: str = "") -> str:
        text = "".join(f"{name} slots={slots}\n" for name in self.names)
        (directory / "hosts").write_text(text + extra)
        return "hosts"

    def start(self, directory: Path, *words: str, where: str | None = None, **env: str) -> subprocess.Popen[str]:
        """`zeroshard` on the launcher's host, or on host `where`."""
        return subprocess.Popen(
            self._inside(where, [sys.executable, "-m", "zeroshard", *words]),
            cwd=directory,
            env=environment({"OMP_NUM_THREADS": "1", **env}),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, directory: Path, *words: str, where: str | None = None, **env: str) -> tuple[int, str, list[str]]:
        """Exit status, output and what was said, of a `zeroshard` that ends by itself."""
        process = self.start(directory, *words, where=where, **env)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err.splitlines()

    def _inside(self, where: str | None, command: list[str]) -> list[str]:
        namespace = f"{self.prefix}hub" if where is None else self.namespace(where)
        # nsenter keeps the mounts: a process started so sees the same /sys and /tmp.
        return ["nsenter", f"--net=/run/netns/{namespace}", "--", *command]

    def processes(self, name: str) -> dict[int, str]:
        """Processes of a job on the host, without the sshd that waits for connections."""
        done = subprocess.run(["ip", "netns", "pids", self.namespace(name)], capture_output=True, text=True, check=True)
        found: dict[int, str] = {}
        for pid in map(int, done.stdout.split()):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if words and "[listener]" not in words and "sshd -D" not in words:
                found[pid] = words
        return found

    def left_running(self, seconds: float = 10.0) -> dict[str, dict[int, str]]:
        """What still runs on any host when it has had time to end."""
        deadline = time.monotonic() + seconds
        while True:
            left = {name: found for name in self.names if (found := self.processes(name))}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    @contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """The host without its network: nothing is refused or closed, packets just vanish."""
        link = ("-n", f"{self.prefix}hub", "link", "set", f"v{self.names.index(name)}")
        _ip(*link, "down")
        try:
            yield
        finally:
            _ip(*link, "up")

    def find(self, name: str, words: str) -> int:
        """The process on a host whose command line has these words."""
        found = [pid for pid, line in self.processes(name).items() if words in line]
        assert len(found) == 1, (words, self.processes(name))
        return found[0]


@contextmanager
def make_hosts(directory: Path, count: int = 2) -> Iterator[TestHosts]:
    """Hosts with their sshd running; all is gone afterwards."""
    prefix = f"zs{os.getpid()}"
    hosts = TestHosts(prefix, directory, tuple(f"10.77.0.{11 + number}" for number in range(count)))
    daemons: list[subprocess.Popen[bytes]] = []
    _make_keys(directory)
    try:
        _ip("netns", "add", f"{prefix}hub")
        _ip("-n", f"{prefix}hub", "link", "add", "bridge", "type", "bridge")
        _ip("-n", f"{prefix}hub", "addr", "add", "10.77.0.1/24", "dev", "bridge")
        for device in ("lo", "bridge"):
            _ip("-n", f"{prefix}hub", "link", "set", device, "up")
        for number, name in enumerate(hosts.names):
            _add_host(f"{prefix}hub", f"{prefix}h{number}", name, number)
            daemons.append(_start_sshd(hosts, name))
        for name in hosts.names:
            _wait_for_port(hosts, name)
        yield hosts
    finally:
        for number in range(count):
            for pid in hosts.processes(hosts.names[number]):
                os.kill(pid, 9)
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        for namespace in [f"{prefix}h{number}" for number in range(count)] + [f"{prefix}hub"]:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _make_keys(directory: Path) -> None:
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
    (directory / "key.pub").rename(directory / "authorized_keys")
    Path("/run/sshd").mkdir(exist_ok=True)


def _add_host(hub: str, namespace: str, address: str, number: int) -> None:
    _ip("netns", "add", namespace)
    _ip("-n", hub, "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("-n", hub, "link", "set", f"v{number}", "master", "bridge", "up")
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", namespace, "link", "set", device, "up")


def _start_sshd(hosts: TestHosts, name: str) -> subprocess.Popen[bytes]:
    daemon = _which("sshd")
    assert daemon is not None
    options = {
        "Port": str(PORT),
        "ListenAddress": name,
        "HostKey": f"{hosts.directory}/host_key",
        "AuthorizedKeysFile": f"{hosts.directory}/authorized_keys",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "PasswordAuthentication": "no",
        "AcceptEnv": "none",
    }
    words = [word for option, value in options.items() for word in ("-o", f"{option}={value}")]
    return subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{hosts.namespace(name)}", daemon, "-D", "-f", "/dev/null", *words],
        stderr=subprocess.DEVNULL,
        # What the daemon passes on to a session must not be what the tests' own environment says.
        env={name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")},
    )


def _wait_for_port(hosts: TestHosts, name: str) -> None:
    probe = f"import socket; socket.create_connection(({name!r}, {PORT}), timeout=1)"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        command = ["nsenter", f"--net=/run/netns/{hosts.prefix}hub", sys.executable, "-S", "-c", probe]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)
    raise AssertionError(f"the sshd of {name} did not start")

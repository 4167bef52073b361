"""Opens the channels to all hosts of a job: an ssh each, or one pdsh that starts them.

    ssh     launcher == pipes ==> ssh a,  ssh b
    pdsh    launcher == fifos ==> ssh a,  ssh b      and  launcher -- starts --> pdsh -- starts --> ssh a, ssh b

pdsh gives its commands no input and mixes their output into lines. So each ssh under it opens three fifos, and the
launcher hears every host apart, as without pdsh. The fifos are in a directory that only its owner can enter.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from zeroshard.launch.channel import Channel, Pipes
from zeroshard.launch.hosts import Host
from zeroshard.launch.transport import Launcher, Reach, pdsh_command, ssh_command


@contextmanager
def open_channels(
    launcher: Launcher, hosts: Sequence[Host], reach: Reach, variables: Mapping[str, str]
) -> Iterator[list[Channel]]:
    """A channel to each host, to whose nodes the variables are sent; all are ended on the way out."""
    line = json.dumps(variables)
    channels: list[Channel] = []
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as directory:
        try:
            if launcher is Launcher.PDSH:
                channels += _by_pdsh(hosts, reach, Path(directory), line)
            else:
                for host in hosts:
                    channels.append(_by_ssh(host, reach, line))
            yield channels
        finally:
            for channel in channels:
                channel.close_input()
                channel.kill()


def _by_ssh(host: Host, reach: Reach, line: str) -> Channel:
    process = subprocess.Popen(
        ssh_command(host.name, reach, Path.cwd()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        # Ctrl-C at the terminal is for the launcher, which tells the nodes.
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    return Channel(host.name, process, Pipes(process.stdin, process.stdout, process.stderr), line)


def _by_pdsh(hosts: Sequence[Host], reach: Reach, directory: Path, line: str) -> list[Channel]:
    command = pdsh_command(hosts, reach, Path.cwd(), directory)
    pipes = [_fifos(directory, number) for number in range(len(hosts))]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return [Channel(host.name, process, ends, line) for host, ends in zip(hosts, pipes, strict=True)]


def _fifos(directory: Path, number: int) -> Pipes:
    paths = [directory / f"{number}.{kind}" for kind in ("in", "out", "err")]
    for path in paths:
        os.mkfifo(path, mode=0o600)
    # Read and write, so that the open does not wait for the ssh; the ssh sees the end when this one descriptor goes.
    into = os.open(paths[0], os.O_RDWR | os.O_CLOEXEC)
    output, errors = (os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) for path in paths[1:])
    return Pipes(os.fdopen(into, "wb", buffering=0), os.fdopen(output, "rb", buffering=0), os.fdopen(errors, "rb", 0))

"""Chooses hosts and their slots: the hostfile, `--include`, `--exclude`, `--num-nodes` and `--num-gpus`.

    # hostfile                --include 'a:0,2@b'      a: slots 0 and 2, b: all
    a slots=4                 --exclude 'a:1@b'        all but slot 1 of a and all of b
    b slots=4

The formats are those of DeepSpeed's launcher. Other than there, these are errors: a host that is there twice, a slot
that a host does not have, and filters that leave no host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zeroshard.bounded import read_bounded
from zeroshard.errors import UsageError
from zeroshard.launch.resources import MAX_RANKS

# A name, an address, an IPv6 address with or without brackets; no lists or ranges, which pdsh would expand.
_NAME = r"(?:[\w.-]+@)?(?:[\w:][\w.:%-]*|\[[\w.:%]+\])"
_LINE = re.compile(rf"(?P<name>{_NAME})\s+slots=(?P<slots>[0-9]+)")
_MAX_HOSTS = 4096  # the launcher has an ssh to each


@dataclass(frozen=True)
class Host:
    """A host that takes part.

    Attributes:
        slots: the numbers of its slots that are used.
        line: its line in the hostfile; 0 without one.
        filtered: whether it has further slots.
    """

    name: str
    slots: tuple[int, ...]
    line: int = 0
    filtered: bool = False


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file of lines `host slots=N`; empty lines and comments after a # are skipped.

    Raises:
        UsageError: the file can't be read, names no host, or has a wrong line, whose number the message says.
    """
    try:
        text = read_bounded(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--hostfile {path}: can't be read ({reason})") from error
    hosts: dict[str, Host] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise UsageError(f"{path}, line {number}: {line!r} is not of the form 'host slots=N'")
        # ssh would take brackets for a part of the name, and pdsh for a range.
        name, slots = match["name"].replace("[", "").replace("]", ""), int(match["slots"][:9])
        if slots > MAX_RANKS:
            raise UsageError(f"{path}, line {number}: {name} with {match['slots']} slots; at most {MAX_RANKS} can be")
        if slots == 0:
            raise UsageError(f"{path}, line {number}: {name} has no slots; leave the line out, or give slots=1 or more")
        if name in hosts:
            raise UsageError(f"{path}, line {number}: {name} is there twice, first in line {hosts[name].line}")
        if len(hosts) == _MAX_HOSTS:
            raise UsageError(f"{path}, line {number}: more than {_MAX_HOSTS} hosts; that many need Slurm or mpirun")
        hosts[name] = Host(name, tuple(range(slots)), number)
    if not hosts:
        raise UsageError(f"--hostfile {path}: it names no host; write a line 'host slots=N' for each")
    return tuple(hosts.values())


def select(
    hosts: Sequence[Host],
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int | None = None,
    num_slots: int | None = None,
) -> tuple[Host, ...]:
    """The hosts that take part, in the order of `hosts`.

    Raises:
        UsageError: a host or slot does not exist, filters can't be combined, or no host is left.
    """
    if include and exclude:
        raise UsageError("--include and --exclude can't be combined; give the one that is shorter")
    if (include or exclude) and (num_nodes is not None or num_slots is not None):
        raise UsageError("--num-nodes and --num-gpus can't be combined with --include or --exclude")
    if include:
        chosen = _included(hosts, _parse("--include", include, hosts))
    elif exclude:
        chosen = _excluded(hosts, _parse("--exclude", exclude, hosts))
    else:
        chosen = _first(hosts, num_nodes, num_slots)
    if not chosen:
        raise UsageError(f"--exclude {exclude}: no host is left")
    return tuple(chosen)


def _parse(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...] | None]:
    """Slots by host, None for all of them."""
    known = {host.name: host for host in hosts}
    parsed: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        name, colon, slots = _split_name(part.strip())
        if name not in known:
            raise UsageError(f"{option} {text}: {name!r} is no host; there are {', '.join(known)}")
        if name in parsed:
            raise UsageError(f"{option} {text}: {name} is there twice; write its slots as {name}:0,1")
        parsed[name] = _slots(option, text, slots, known[name]) if colon else None
    return parsed


def _split_name(part: str) -> tuple[str, str, str]:
    """Name, colon and slots; an address that contains colons must be in brackets: `[fe80::1]:0,1`."""
    if not part.startswith("["):
        return part.partition(":")
    name, _, rest = part[1:].partition("]")
    return name, rest[:1], rest[1:]


def _slots(option: str, text: str, slots: str, host: Host) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", slots):
        raise UsageError(f"{option} {text}: the slots of {host.name} are not of the form 0,1,2")
    numbers = tuple(sorted(int(slot) for slot in slots.split(",")))
    for number in numbers:
        if number not in host.slots:
            raise UsageError(f"{option} {text}: {host.name} has no slot {number}; it has {_span(host.slots)}")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{option} {text}: a slot of {host.name} is there twice")
    return numbers


def _span(slots: tuple[int, ...]) -> str:
    return f"slots 0 to {slots[-1]}" if len(slots) > 1 else "slot 0 alone"


def _included(hosts: Sequence[Host], wanted: dict[str, tuple[int, ...] | None]) -> list[Host]:
    return [_with_slots(host, wanted[host.name] or host.slots) for host in hosts if host.name in wanted]


def _excluded(hosts: Sequence[Host], unwanted: dict[str, tuple[int, ...] | None]) -> list[Host]:
    chosen: list[Host] = []
    for host in hosts:
        removed = (unwanted[host.name] or host.slots) if host.name in unwanted else ()
        left = tuple(slot for slot in host.slots if slot not in removed)
        if left:
            chosen.append(_with_slots(host, left))
    return chosen


def _first(hosts: Sequence[Host], num_nodes: int | None, num_slots: int | None) -> list[Host]:
    if num_nodes is not None and num_nodes > len(hosts):
        raise UsageError(f"--num-nodes {num_nodes}: the hostfile has {len(hosts)}")
    chosen = list(hosts[:num_nodes])
    if num_slots is None:
        return chosen
    for host in chosen:
        if num_slots > len(host.slots):
            raise UsageError(f"--num-gpus {num_slots}: {host.name} has {len(host.slots)} slots (line {host.line})")
    return [_with_slots(host, host.slots[:num_slots]) for host in chosen]


def _with_slots(host: Host, slots: tuple[int, ...]) -> Host:
    return replace(host, slots=slots, filtered=host.filtered or slots != host.slots)

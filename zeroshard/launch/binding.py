"""Cores for each rank: from the machine's NUMA nodes, the cores this process may use, and where the GPUs are.

    node 0: cores 0-3   node 1: cores 4-7        4 ranks: 0 1 | 2 3 | 4 5 | 6 7      3 ranks: 0 1 | 2 3 | 4-7
    GPU 0, 1 at node 1                           ranks 0 and 1 share node 1: 4 5 | 6 7

The mask is set in each rank before its script starts (runner.py), from a variable. Memory follows: Linux puts a page on
the node of the core that first touches it. Where numactl is installed the rank runs under it, which also makes memory
of other nodes a second choice. Binding from the agent was rejected: it starts all ranks with one command.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import UsageError
from zeroshard.launch.runner import CORES_VARIABLE

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node and those of its cores that may be used, one hardware thread of each."""

    number: int
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Binding:
    """What one rank gets."""

    cores: tuple[int, ...]
    nodes: tuple[int, ...]


def bind_ranks(nproc: int, core_list: str | None, environ: MutableMapping[str, str]) -> str:
    """Put the ranks' cores into `environ`, with as many threads; what holds now, in words.

    Raises UsageError for cores that are not there or not this process's, and for fewer cores than ranks.
    """
    usable = os.sched_getaffinity(0)
    wanted = parse_cores(core_list) if core_list is not None else None
    for core in sorted(wanted or ()):
        if core not in usable:
            raise UsageError(f"--bind-core-list {core_list}: core {core} is not there, or not for this process to use")
    nodes = read_nodes(_SYSTEM, wanted or usable, one_thread=wanted is None)
    bindings = divide(nodes, nproc, _gpu_nodes(nproc))
    numactl = shutil.which("numactl")
    environ[CORES_VARIABLE] = json.dumps(
        [{"cores": binding.cores, "nodes": binding.nodes, "numactl": numactl} for binding in bindings]
    )
    fewest = min(len(binding.cores) for binding in bindings)
    environ.setdefault("OMP_NUM_THREADS", str(fewest))
    shares = ", ".join(format_cores(binding.cores) for binding in bindings)
    means = "numactl" if numactl else "an affinity mask"
    return f"bound to cores {shares} with {means}, OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}"


def parse_cores(text: str) -> set[int]:
    """The cores of '0-27,56'; UsageError if it is of another form, or names a core twice."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise UsageError(f"--bind-core-list {text}: {part!r} is not of the form 3 or 0-27")
        cores += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(cores)) < len(cores):
        raise UsageError(f"--bind-core-list {text}: a core is there twice")
    return set(cores)


def format_cores(cores: Sequence[int]) -> str:
    """The reverse of `parse_cores`: (0, 1, 2, 5) is '0-2,5'."""
    parts: list[str] = []
    ordered = sorted(cores)
    start = 0
    for place, core in enumerate(ordered):
        if place + 1 == len(ordered) or ordered[place + 1] != core + 1:
            parts.append(str(core) if place == start else f"{ordered[start]}-{core}")
            start = place + 1
    return ",".join(parts)


def read_nodes(system: Path, usable: set[int], one_thread: bool = True) -> tuple[NumaNode, ...]:
    """NUMA nodes with usable cores; one node of everything where the kernel tells of none.

    With `one_thread` only the first usable hardware thread of each core counts: two of them share its arithmetic.
    """
    if one_thread:
        usable = _one_thread_per_core(system, usable)
    nodes: list[NumaNode] = []
    for path in sorted(system.glob("node/node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])):
        text = path.read_text().strip()
        cores = tuple(sorted(parse_cores(text) & usable)) if text else ()
        if cores:
            nodes.append(NumaNode(int(path.parent.name[4:]), cores))
    return tuple(nodes) or (NumaNode(0, tuple(sorted(usable))),)


def _one_thread_per_core(system: Path, usable: set[int]) -> set[int]:
    chosen: set[int] = set()
    for cpu in sorted(usable):
        siblings = system / f"cpu/cpu{cpu}/topology/thread_siblings_list"
        threads = parse_cores(siblings.read_text().strip()) if siblings.exists() else {cpu}
        if not threads & chosen:
            chosen.add(cpu)
    return chosen


def divide(nodes: Sequence[NumaNode], nproc: int, homes: Sequence[int | None]) -> list[Binding]:
    """The cores of each rank: those of its home node shared with the others at home there.

    `homes[rank]` is the NUMA node of the rank's GPU, None where it has none or it is not known; such ranks are spread
    over the nodes in order. A rank alone on several nodes (fewer ranks than nodes) gets them all.
    """
    total = sum(len(node.cores) for node in nodes)
    if total < nproc:
        raise UsageError(f"--bind-cores: {nproc} ranks, but {total} core{'s' if total != 1 else ''} to divide")
    known = {node.number for node in nodes}
    if any(home is None or home not in known for home in homes):
        if nproc < len(nodes):
            return [
                _binding(nodes[_cut(rank, nproc, len(nodes)) : _cut(rank + 1, nproc, len(nodes))])
                for rank in range(nproc)
            ]
        homes = [nodes[rank * len(nodes) // nproc].number for rank in range(nproc)]
    bindings: list[Binding] = []
    for rank, home in enumerate(homes):
        node = next(node for node in nodes if node.number == home)
        here = [other for other, theirs in enumerate(homes) if theirs == home]
        if len(here) > len(node.cores):
            return _ignoring_nodes(nodes, nproc)
        place, count = here.index(rank), len(here)
        cores = node.cores[_cut(place, count, len(node.cores)) : _cut(place + 1, count, len(node.cores))]
        bindings.append(Binding(cores, (node.number,)))
    return bindings


def _ignoring_nodes(nodes: Sequence[NumaNode], nproc: int) -> list[Binding]:
    """More ranks at home on a node than it has cores: all cores in order, wherever they are."""
    cores = [(core, node.number) for node in nodes for core in node.cores]
    bindings: list[Binding] = []
    for rank in range(nproc):
        mine = cores[_cut(rank, nproc, len(cores)) : _cut(rank + 1, nproc, len(cores))]
        bindings.append(Binding(tuple(core for core, _ in mine), tuple(sorted({node for _, node in mine}))))
    return bindings


def _binding(nodes: Sequence[NumaNode]) -> Binding:
    return Binding(tuple(core for node in nodes for core in node.cores), tuple(node.number for node in nodes))


def _cut(place: int, parts: int, total: int) -> int:
    return place * total // parts


def _gpu_nodes(nproc: int) -> list[int | None]:
    """The NUMA node of each local rank's GPU, by the kernel's word on its PCI device."""
    import torch

    if not torch.cuda.is_available():
        return [None] * nproc
    homes: list[int | None] = []
    for index in range(nproc):
        found = torch.cuda.get_device_properties(index)
        name = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        path = Path("/sys/bus/pci/devices", name, "numa_node")
        number = int(path.read_text()) if path.exists() else -1
        homes.append(number if number >= 0 else None)
    return homes

"""A step over a slow link between two nodes: ZeRO-3, second copies, codes, differences, and FSDP2's HSDP.

    python -m benchmarks slow_links [--width 1024] [--layers 24] [--steps 4] [--rate 1gbit] [--rounds 1] [--json FILE]

Two network namespaces stand for two nodes of two ranks each; a pair of virtual interfaces joins them, which tc limits.
The ranks are real processes that meet through gloo. Needs root, `ip` and `tc`; the namespaces are removed at the end,
whatever happens. All ways are measured over the link without a limit first, then with it. Beside the seconds stands the
prediction: what it takes without the limit, and what the plan sends over the link at its rate. (That counts what gloo
does: its reduce-scatter is an all-reduce, and a ring over all ranks crosses the link once in each direction.)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NODES, PER_NODE = 2, 2
LINK = "link0"
WAYS = ("zero3", "hpz", "zero++", "differences", "fsdp2-hsdp")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=1, help="of all ways, in turns; the median counts")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rate = bits_per_second(options.rate)
    if os.geteuid() != 0:
        print("slow_links makes network namespaces, which needs root", file=sys.stderr)
        return 2
    shape = ["--width", str(options.width), "--layers", str(options.layers), "--steps", str(options.steps)]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    with nodes() as names:
        for _ in range(options.rounds):
            limit(names, None)
            free = measure(names, [*shape, "--ways", *options.ways], options.timeout)
            limit(names, options.rate)
            slow = measure(names, [*shape, "--ways", *options.ways], options.timeout)
            for way in options.ways:
                alone = free[way]["seconds"]
                predicted = alone + slow[way]["link_bytes"] * 8 / rate
                found[way].append({**slow[way], "without_limit": alone, "predicted": predicted})
    rows = {way: median(measured) for way, measured in found.items()}
    show(rows, rate)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def bits_per_second(rate: str) -> float:
    """'1gbit' as a number. Raises SystemExit for what tc would not understand either."""
    found = re.fullmatch(r"([0-9.]+)(kbit|mbit|gbit)", rate)
    if found is None:
        raise SystemExit(f"--rate {rate}: write a number and kbit, mbit or gbit, such as 1gbit")
    return float(found[1]) * UNITS[found[2]]


def median(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """The round in the middle by seconds."""
    return sorted(measured, key=lambda row: row["seconds"])[len(measured) // 2]


def show(rows: dict[str, dict[str, float]], rate: float) -> None:
    """A table; times are those of a step."""
    first = next(iter(rows.values()))
    print(
        f"{first['parameters'] / 1e6:.1f}M parameters, {NODES} nodes of {PER_NODE} ranks, {rate / 1e9:g} Gb/s between"
    )
    print("| way | step, s | predicted, s | without the limit, s | MB over the link, each way | against ZeRO-3 |")
    print("|---|---|---|---|---|---|")
    for way, row in rows.items():
        gain = rows["zero3"]["seconds"] / row["seconds"] if "zero3" in rows else float("nan")
        cells = (row["seconds"], row["predicted"], row["without_limit"], row["link_bytes"] / 1e6)
        print(f"| {way} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {gain:.2f}x |")


# Namespaces.


@contextmanager
def nodes() -> Iterator[list[str]]:
    """Two namespaces, joined by a pair of interfaces; removed at the end with all that is in them."""
    names = [f"zeroshard-{os.getpid()}-{node}" for node in range(NODES)]
    ends = [f"zs{os.getpid() % 10_000}{side}" for side in "ab"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for node, (name, end) in enumerate(zip(names, ends, strict=True)):
            ip("link", "set", end, "netns", name, "name", LINK)
            ip("-n", name, "addr", "add", f"{address(node)}/24", "dev", LINK)
            ip("-n", name, "link", "set", LINK, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", ends[0]], check=False, capture_output=True)


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def limit(names: Sequence[str], rate: str | None) -> None:
    """Limit what leaves each node; None takes the limit away."""
    for name in names:
        inside = ["ip", "netns", "exec", name, "tc", "qdisc"]
        subprocess.run([*inside, "del", "dev", LINK, "root"], check=False, capture_output=True)
        if rate is not None:
            how = ["root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
            subprocess.run([*inside, "add", "dev", LINK, *how], check=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


# Ranks.


def measure(names: Sequence[str], arguments: Sequence[str], timeout: float) -> dict[str, dict[str, float]]:
    """Run the ranks, each in its node; what rank 0 found, by way. Raises SystemExit where one fails or time is up."""
    world = NODES * PER_NODE
    with tempfile.TemporaryDirectory(prefix="slow-links-") as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(world)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                inside = ["ip", "netns", "exec", names[rank // PER_NODE]]
                command = [*inside, sys.executable, "-m", "benchmarks.slow_links_rank"]
                with logs[rank].open("wb") as log:
                    ranks.append(
                        subprocess.Popen(
                            [*command, *arguments], cwd=ROOT, env=variables(rank, world), stdout=log, stderr=log
                        )
                    )
            wait(ranks, logs, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()
        lines = logs[0].read_text(errors="replace").splitlines()
        return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def wait(ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline: float) -> None:
    while any(rank.poll() is None for rank in ranks):
        failed = next((number for number, rank in enumerate(ranks) if rank.returncode), None)
        if failed is not None or time.monotonic() > deadline:
            tail = "\n".join(logs[failed or 0].read_text(errors="replace").splitlines()[-20:])
            raise SystemExit(f"rank {failed or 0} {'failed' if failed is not None else 'is out of time'}:\n{tail}")
        time.sleep(0.05)
    if any(rank.returncode for rank in ranks):
        raise SystemExit("\n".join(log.read_text(errors="replace")[-2000:] for log in logs))


def variables(rank: int, world: int) -> dict[str, str]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank % PER_NODE), "WORLD_SIZE": str(world), "MASTER_PORT": "29577"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared = {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return {**os.environ, **shared, **own}


if __name__ == "__main__":
    sys.exit(main())

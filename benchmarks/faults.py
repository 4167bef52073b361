"""What zeroshard says of runs that something is wrong with: faults of many kinds, and whether it names them.

    python -m benchmarks faults [--count 200] [--healthy 20] [--seed 0] [--kinds tokens loader ...] [--json FILE]

Each run is a small model on two or three real ranks that meet through gloo, with one fault, whose rank, moment and size
are drawn from the seed. Then the product's own words are read: the findings of `zeroshard explain` over the logs that
the ranks left, or the error with which they ended. A fault is named rightly where the first finding has its cause and
its rank. Any other answer is a wrong name, also of a healthy run; and whatever calls a disk, a link or a processor slow
that is not is counted apart. Kinds that need root or a tool that is not here are left out, and the table says so.

A machine that others use has faults of its own: where a run is said to lack a processor and /proc/stat says that other
programs took more than a tenth of one meanwhile, it is made again, three times at most; `again` counts these.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fault_kinds import FAULTS, KINDS, Fault, draw
from benchmarks.fault_rank import train
from tests.support.distributed import run_ranks
from zeroshard.errors import UsageError
from zeroshard.observe.runs.explain import findings
from zeroshard.observe.runs.findings import HARDWARE, Cause
from zeroshard.observe.runs.log import read_ranks

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 120.0
OUTCOMES = ("right", "not named", "wrong", "hardware")
TRIES, OTHERS = 3, 0.1
LINE = "fault: "


@dataclasses.dataclass(frozen=True)
class Said:
    """What zeroshard said of a run.

    Attributes:
        found: cause and rank of each finding.
        error: the text of the error with which the ranks ended; "" where they did not.
        texts: the findings in words.
        others: processors that programs took which are no ranks; 0.0 where that is not known.
    """

    found: tuple[tuple[str, int | None], ...]
    error: str
    texts: tuple[str, ...] = ()
    others: float = 0.0


def main() -> int:
    args = _parse()
    rows: list[dict[str, Any]]
    if args.one is not None:
        print(LINE + json.dumps(dataclasses.asdict(_run(Fault(**json.loads(args.one))))))
        return 0
    if args.show is not None:
        rows = [row for path in args.show for row in json.loads(path.read_text())]
        show(rows)
        return 0 if holds(rows) else 1
    kinds = [kind for kind in args.kinds if why_not(kind) is None]
    skipped = {kind: why_not(kind) for kind in args.kinds if kind not in kinds}
    faults = [draw(kinds[number % len(kinds)], args.seed + number) for number in range(args.count)] if kinds else []
    faults += [draw("healthy", args.seed + args.count + number) for number in range(args.healthy)]
    rows = []
    for number, fault in enumerate(faults):
        begin = time.monotonic()
        said, again = measured(fault), 0
        while disturbed(fault, said) and again < TRIES:
            said, again = measured(fault), again + 1
        outcome = judge(fault, said)
        told = {"fault": dataclasses.asdict(fault), "said": dataclasses.asdict(said)}
        rows.append({**told, "outcome": outcome, "again": again})
        words = said.error.splitlines()[-1:] or [f"{cause} ({rank})" for cause, rank in said.found] or ["nothing"]
        where = f"rank {fault.rank} of {fault.ranks}" if fault.rank >= 0 else f"all {fault.ranks} ranks"
        line = f"{number + 1}/{len(faults)} {fault.kind}, {where}: {outcome} [{time.monotonic() - begin:.1f} s]"
        print(f"{line}: {', '.join(words)[:200]}", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)
    for kind, why in skipped.items():
        print(f"left out: {kind}, {why}")
    return 0 if holds(rows) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="runs with a fault")
    parser.add_argument("--healthy", type=int, default=20, help="runs without one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--json", type=Path, help="a file for every run and what was said of it")
    parser.add_argument("--show", type=Path, nargs="+", help="run nothing, and show files of --json together")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def why_not(kind: str) -> str | None:
    """Why this machine can't provoke a kind; None where it can."""
    needs = KINDS[kind].needs
    if needs is None:
        return None
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which(needs) is None:
        return f"which needs root, ip and {needs}"
    return None


def measured(fault: Fault) -> Said:
    """Make a run, and read what zeroshard says of it."""
    if fault.kind != "link":
        return _run(fault)
    with slow_loopback(fault) as name:
        text = json.dumps(dataclasses.asdict(fault))
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.faults", "--one", text]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * TIMEOUT)
    lines = [line.removeprefix(LINE) for line in done.stdout.splitlines() if line.startswith(LINE)]
    if not lines:
        return Said((), done.stderr)
    told = json.loads(lines[-1])
    found = tuple((cause, rank) for cause, rank in told["found"])
    return Said(found, told["error"], tuple(told["texts"]), told["others"])


def _run(fault: Fault) -> Said:
    with tempfile.TemporaryDirectory(prefix="fault-", dir=_disk_folder()) as folder:
        error, mine = "", math.nan
        before, begin = _busy(), time.monotonic()
        try:
            mine = sum(run_ranks(fault.ranks, train, fault, folder, timeout=TIMEOUT))
        except AssertionError as failure:
            error = str(failure)
        others = (_busy() - before - mine) / (time.monotonic() - begin)
        try:
            found = findings(read_ranks(Path(folder, "run.jsonl")))
        except UsageError:
            found = []
        named = tuple((str(one.cause), one.rank) for one in found)
        return Said(named, error, tuple(one.text for one in found), 0.0 if math.isnan(others) else others)


def _busy() -> float:
    """Seconds that all processors of this machine were busy so far; 0.0 where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, interrupts, soft, *_ = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def disturbed(fault: Fault, said: Said) -> bool:
    """Whether a rank is said to lack a processor, and other programs did take some."""
    named = str(Cause.PROCESSOR) in {cause for cause, _ in said.found}
    return named and fault.kind != "processor" and said.others > OTHERS


def _disk_folder() -> Path:
    """A folder on a disk, as state there needs one."""
    return Path(tempfile.gettempdir())


@contextmanager
def slow_loopback(fault: Fault) -> Iterator[str]:
    """A network namespace whose loopback is slow, so that its ranks have a slow link to each other."""
    name = f"zeroshard-fault-{os.getpid()}"
    inside = ["ip", "netns", "exec", name]
    rate = f"{fault.numbers['mbit']:.0f}mbit"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        limit = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "256k", "latency", "100ms"]
        subprocess.run([*inside, *limit], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def judge(fault: Fault, said: Said) -> str:
    """One of `OUTCOMES`."""
    kind = KINDS[fault.kind]
    blamed = {cause for cause, _ in said.found if Cause(cause) in HARDWARE and Cause(cause) is not kind.cause}
    if blamed:
        return "hardware"
    if kind.error is not None:
        pattern = kind.error.replace("{rank}", str(fault.rank))
        return "right" if re.search(pattern, said.error) else "wrong" if said.error or said.found else "not named"
    if said.error:
        return "wrong"
    if kind.cause is None:
        return "wrong" if said.found else "right"
    if not said.found:
        return "not named"
    cause, rank = said.found[0]
    right_rank = rank is None if fault.rank == -1 else rank == fault.rank
    return "right" if Cause(cause) is kind.cause and right_rank else "wrong"


def holds(rows: Sequence[dict[str, Any]]) -> bool:
    """At least 95 % are named rightly, none is called hardware, and no healthy run has a name."""
    counts = Counter(row["outcome"] for row in rows if row["fault"]["kind"] != "healthy")
    healthy = all(row["outcome"] == "right" for row in rows if row["fault"]["kind"] == "healthy")
    every = sum(counts.values())
    return healthy and not counts["hardware"] and counts["right"] >= 0.95 * every


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table by kind."""
    table = Table(title=f"{len(rows)} runs")
    for column in ("kind", "what", "runs", *OUTCOMES, "again"):
        table.add_column(column, justify="left" if column in ("kind", "what") else "right")
    kinds = list(dict.fromkeys(row["fault"]["kind"] for row in rows))
    for kind in kinds:
        of_kind = [row for row in rows if row["fault"]["kind"] == kind]
        counts = Counter(row["outcome"] for row in of_kind)
        cells = [str(counts[outcome] or "") for outcome in OUTCOMES]
        again = sum(row["again"] for row in of_kind)
        table.add_row(kind, KINDS[kind].text, str(len(of_kind)), *cells, str(again or ""))
    counts = Counter(row["outcome"] for row in rows if row["fault"]["kind"] != "healthy")
    table.add_section()
    table.add_row("all faults", "", str(sum(counts.values())), *(str(counts[outcome]) for outcome in OUTCOMES))
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())

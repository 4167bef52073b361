"""Kills of every kind in an elastic job for half an hour: what was lost, what hung, how much time was useful.

    python -m benchmarks elastic --kills 50 --minutes 30

Nodes are network namespaces (root), or with --loopback processes of this host, without cuts of the network. Every few
seconds one is hurt: a rank, the agent or the launcher is killed, a rank is stopped, the host loses its power or its
network; then it is started again. At the end the samples of all steps are compared with those of a run in which nothing
happened. The time is useful as far as it went into steps that the final state has, at the pace of undisturbed ones.
Every 50 steps a checkpoint goes to disk: two neighbours that are lost at once leave no copy in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path

from tests.launch.hosts import TestHosts, make_hosts, why_not
from tests.support.elastic_job import ElasticJob
from tests.support.elastic_train import BATCH, Line, planned, trained_on

KINDS = ("rank", "agent", "launcher", "host", "stop", "network")
_HANG_SECONDS = 120.0


def hurt(job: ElasticJob, hosts: TestHosts | None, node: int, kind: str) -> None:
    """Do one harm to a node; it is started again unless it does so by itself."""
    if kind in ("rank", "stop"):
        ranks = job.ranks(node)
        if ranks:
            with suppress(ProcessLookupError):
                os.kill(random.choice(ranks), signal.SIGKILL if kind == "rank" else signal.SIGSTOP)
        return
    if kind == "agent":
        agent = job.agent(node)
        if agent is not None:
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
        job.wait(node, 60)
    elif kind == "launcher":
        job.kill_launcher(node)
    elif kind == "network" and hosts is not None:
        with hosts.unplugged(hosts.names[node]):
            job.wait(node, 60)
    else:
        job.power_off(node)
    job.start(node)


def until_trained(job: ElasticJob, seconds: float, since: float) -> bool:
    """Whether a step is made after a moment, within so many seconds."""
    end = time.time() + seconds
    while time.time() < end:
        if any(line.what == "step" and line.when > since for line in job.log()):
            return True
        time.sleep(0.1)
    return False


def report(lines: Sequence[Line], kinds: Counter[str], hung: int, pauses: dict[str, list[float]]) -> dict[str, object]:
    """What came of it."""
    steps = [line for line in lines if line.what == "step"]
    found = trained_on(lines)
    expected = planned(max(found))
    wrong = [step for step in found if found[step] != expected[step]]
    missing = sorted(set(expected) - set(found))
    newest: dict[int, Line] = {}
    for line in steps:
        if line.step not in newest or line.round > newest[line.step].round:
            newest[line.step] = line
    ordered = [newest[step] for step in sorted(newest)]
    gaps = [b.when - a.when for a, b in pairwise(ordered) if a.round == b.round]
    total = max(line.when for line in steps) - min(line.when for line in steps)
    # The pace of a round depends on its ranks, as the accumulation does.
    pace: dict[int, float] = {}
    for ranks in {line.ranks for line in ordered}:
        own = [b.when - a.when for a, b in pairwise(ordered) if a.round == b.round and b.ranks == ranks]
        pace[ranks] = statistics.median(own) if own else statistics.median(gaps)
    useful = sum(pace[line.ranks] for line in ordered[1:])
    within = sum(gaps)
    stalls = [b.when - a.when for a, b in pairwise(ordered) if a.round != b.round]
    return {
        "kills": dict(kinds),
        "rounds": 1 + max(line.round for line in steps),
        "steps": max(found),
        "steps made again": len({(line.step, line.round) for line in steps}) - len(found),
        "hangs": hung,
        "steps with other samples": len(wrong) + len(missing),
        "the first of them": [_difference(step, found.get(step, []), expected[step]) for step in (wrong + missing)[:5]],
        "useful": round(useful / total, 4),
        "seconds": {
            "all": round(total, 1),
            "in steps of a round": round(within, 1),
            "of these above the median": round(within - useful, 1),
            "from round to round": [round(stall, 1) for stall in stalls],
        },
        "seconds until the next step (median, worst)": {
            kind: [round(statistics.median(values), 1), round(max(values), 1)] for kind, values in pauses.items()
        },
    }


def _difference(step: int, found: Sequence[int], expected: Sequence[int]) -> str:
    lost, repeated = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    return f"step {step}: without {sorted(lost.elements())}, with {sorted(repeated.elements())} besides"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--shard", type=int, default=0, help="ranks of a subgroup; 0: no copies of the state")
    parser.add_argument("--step-seconds", type=float, default=0.3)
    parser.add_argument("--lost-after", type=float, default=3.0)
    parser.add_argument("--begin-seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loopback", action="store_true")
    options = parser.parse_args()
    refused = None if options.loopback else why_not()
    if refused is not None:
        print(f"{refused}; or give --loopback", file=sys.stderr)
        return 2
    random.seed(options.seed)
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        directory = Path(folder)
        (directory / "hosts").mkdir()
        with nullcontext() if options.loopback else make_hosts(directory / "hosts", options.nodes) as hosts:
            found = run(directory, hosts, options)
    print(json.dumps(found, indent=1))
    return 0 if found["hangs"] == 0 and found["steps with other samples"] == 0 else 1


def run(directory: Path, hosts: TestHosts | None, options: argparse.Namespace) -> dict[str, object]:
    """The job, and the harm that is done to it."""
    section = {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [1], "version": 0.1}
    (directory / "ds.json").write_text(json.dumps({"elasticity": section}))
    words = ["--nodes", f"1:{options.nodes}", "--nproc", str(options.nproc), "--elastic", str(directory / "ds.json")]
    words += ["--lost-after", str(options.lost_after), "--last-call", "120"]
    kinds = [kind for kind in KINDS if hosts is not None or kind != "network"]
    counted: Counter[str] = Counter()
    pauses: dict[str, list[float]] = {}
    hung = 0
    arguments = ["1000000", str(options.shard), str(options.step_seconds), str(directory / "disk")]
    with ElasticJob(directory, hosts, words, arguments) as job:
        for node in range(options.nodes):
            job.start(node)
        if not until_trained(job, options.begin_seconds, 0.0):
            last = [f"node {node}: {line}" for node, lines in job.outputs.items() for line in lines[-12:]]
            raise SystemExit("\n".join(["the job did not begin", *last]))
        begun = time.time()
        for number in range(options.kills):
            at = begun + (number + random.random()) * options.minutes * 60 / options.kills
            time.sleep(max(0.0, at - time.time()))
            kind, node = kinds[number % len(kinds)], random.randrange(options.nodes)
            for other in range(options.nodes):
                if not job.running(other):
                    job.start(other)
            now = time.time()
            print(f"{now - begun:7.1f} s: {kind} of node {node}", file=sys.stderr, flush=True)
            hurt(job, hosts, node, kind)
            counted[kind] += 1
            if until_trained(job, _HANG_SECONDS, now + 0.5):
                first = _first_step_elsewhere(job, now)
                pauses.setdefault(kind, []).append(first - now)
            else:
                hung += 1
        time.sleep(max(5.0, begun + options.minutes * 60 - time.time()))
        lines = job.log()
    return report(lines, counted, hung, pauses)


def _first_step_elsewhere(job: ElasticJob, since: float) -> float:
    """When the first step of a later round was made; where the harm has changed nothing, the first step at all."""
    steps = [line for line in job.log() if line.what == "step"]
    before = max((line.round for line in steps if line.when <= since), default=0)
    later = [line.when for line in steps if line.when > since and line.round > before]
    return min(later or [line.when for line in steps if line.when > since])


if __name__ == "__main__":
    sys.exit(main())

"""What the ranks sent: calls and bytes per kind of collective and axes, of this rank, beside what the plan says.

    engine's own counts (kind, unit, bytes)  ──┐
    plan: over which axes such an operation ───┴──> (kind, axes): calls, bytes

The engine counts what it issues anyhow, so counting costs nothing. An operation counts when the process group is given
it, which on a CPU may be in the step after its own. Sizes are payloads, as in `plan/traffic.py`. Rejected: to time each
collective by events around it; on a GPU that puts two more launches beside each, and the planner's clocks tell what
they should take.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

from zeroshard.comm.oplog import OperationLog
from zeroshard.engine.core.handle import Handle
from zeroshard.engine.observing import StepFacts
from zeroshard.errors import UsageError
from zeroshard.mesh import DATA
from zeroshard.observe.listeners import Silent
from zeroshard.plan.plan import Plan
from zeroshard.plan.traffic import Kind, axes_of_operations, several, traffic_by_axes

Counts = dict[Kind, tuple[int, int]]
"""Calls and bytes."""

_LOGS: weakref.WeakSet[CommsLog] = weakref.WeakSet()
"""The logs of the engines of this process: DeepSpeed's `log_summary` is a function that is given none."""


def counter_of(plan: Plan) -> Callable[[OperationLog], Counts]:
    """What counts a log of operations of this plan; worked out once, since it looks at every unit."""
    axes = axes_of_operations(plan)
    everyone = several(plan, plan.mesh.among(DATA))

    def count(log: OperationLog) -> Counts:
        found: Counts = {}
        for operation, calls in log.counts().items():
            kind = operation.kind, axes.get((operation.kind, operation.unit, operation.nbytes), everyone)
            before, nbytes = found.get(kind, (0, 0))
            found[kind] = before + calls, nbytes + calls * operation.nbytes
        return found

    return count


def since(before: Counts, now: Counts) -> Counts:
    """What was issued in between."""
    found: Counts = {}
    for kind, (calls, nbytes) in now.items():
        calls_before, nbytes_before = before.get(kind, (0, 0))
        if calls > calls_before:
            found[kind] = calls - calls_before, nbytes - nbytes_before
    return found


class CommsLog(Silent):
    """The log of one engine.

    Args:
        ops: names of the kinds to tell of, as torch or DeepSpeed spell them; None is all.
        verbose: whether each step is printed.
    """

    def __init__(self, handle: Handle, ops: Iterable[str] | None, *, verbose: bool) -> None:
        self._sent, self._runtime = handle.comm.sent, handle.runtime
        self.is_first = handle.comm.rank == 0
        self._micro_batches = 1
        self._ops = None if ops is None else tuple(name.lower().replace("_", "-") for name in ops)
        self._verbose = verbose
        self._at_end: Counts = {}
        self._after_first: Counts = {}
        self._steps = 0
        _LOGS.add(self)

    def report(self, facts: StepFacts, *, due: bool) -> None:
        """A step has ended."""
        self._micro_batches = facts.micro_batches
        self._steps += 1
        if self._steps == 1:
            self._after_first = self.totals()
        if self._verbose and self.is_first:
            now = self.totals()
            for line in _lines(since(self._at_end, now)):
                print(f"step {facts.step}: {line}", flush=True)
            self._at_end = now

    def totals(self) -> Counts:
        """Calls and bytes since the engine was built, of the kinds that are asked for."""
        return self._asked(counter_of(self._runtime.plan)(self._sent))

    def planned(self) -> Counts:
        """Calls and bytes of a step by the plan that runs, of the kinds that are asked for."""
        return self._asked(traffic_by_axes(self._runtime.plan, micro_batches=self._micro_batches))

    def _asked(self, counts: Counts) -> Counts:
        if self._ops is None:
            return counts
        return {kind: n for kind, n in counts.items() if any(op.startswith(kind[0]) for op in self._ops)}

    def summary(self) -> str:
        """A table: what was sent in all and in a step after the first, and what the plan says of a step."""
        totals, planned = self.totals(), self.planned()
        steady = since(self._after_first, totals)
        rows = [("collective", "over", "calls", "bytes", "bytes/step", "plan's")]
        for kind in sorted({*totals, *planned}):
            calls, nbytes = totals.get(kind, (0, 0))
            mean = round(steady.get(kind, (0, 0))[1] / max(self._steps - 1, 1))
            plan = planned.get(kind, (0, 0))[1]
            rows.append((kind[0], "+".join(kind[1]), f"{calls}", f"{nbytes}", f"{mean}", f"{plan}"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
        return "\n".join("  ".join(row).rstrip() for row in padded)


def _lines(counts: Mapping[Kind, tuple[int, int]]) -> Iterable[str]:
    for (kind, axes), (calls, nbytes) in sorted(counts.items()):
        yield f"{kind} over {'+'.join(axes)}: {calls} calls, {nbytes} bytes"


def log_summary(show_straggler: bool = False) -> str:
    """Print on rank 0 what the engines of this process sent, and return it; waits for nothing.

    Raises:
        UsageError: no engine counts; or for `show_straggler`, since collectives are counted and not timed.
    """
    if show_straggler:
        raise UsageError("log_summary(show_straggler=True): collectives are counted, not timed; leave it out")
    logs = list(_LOGS)
    if not logs:
        raise UsageError('log_summary: nothing was counted; set "comms_logger": {"enabled": true} in the config')
    text = "\n\n".join(log.summary() for log in logs)
    if any(log.is_first for log in logs):
        print(text, flush=True)
    return text

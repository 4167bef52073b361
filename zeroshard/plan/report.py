"""Prints a plan as tables: state bytes per rank compared to plain data parallel, traffic per step, and units."""

from __future__ import annotations

from rich.table import Table

from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.groups import UnitPlan
from zeroshard.plan.memory import StateBytes, state_bytes
from zeroshard.plan.plan import Plan
from zeroshard.plan.traffic import step_traffic


def human_bytes(nbytes: int) -> str:
    """Bytes with three significant digits and a decimal unit (kB is 1000 bytes)."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def data_parallel_bytes(plan: Plan) -> StateBytes:
    """What plain data parallel would hold per rank for the same model and optimizer: everything whole, no padding."""
    param = grad = master = moments = 0
    for _, group in plan.groups():
        numel = group.layout.parameter_numel
        param += numel * itemsize(group.param.dtype)
        if group.grad is not None:
            grad += numel * itemsize(group.grad.dtype)
        if group.master is not None:
            master += numel * itemsize(group.master.dtype)
        if group.moments is not None:
            moments += group.moments.nbytes(numel)
    return StateBytes(param, grad, master, moments, 0, 0, 0)


def memory_table(plan: Plan) -> Table:
    """State bytes per rank by kind, beside plain data parallel."""
    ours, theirs = state_bytes(plan), data_parallel_bytes(plan)
    table = Table(title=f"State per rank, {plan.dp} ranks, {plan.parameter_numel:,} parameters")
    table.add_column("state")
    table.add_column("zeroshard", justify="right")
    table.add_column("plain data parallel", justify="right")
    table.add_column("ratio", justify="right")
    rows = [
        ("parameters", ours.param, theirs.param),
        ("gradients", ours.grad, theirs.grad),
        ("master weights", ours.master, theirs.master),
        ("optimizer moments", ours.moments, theirs.moments),
        ("gather slots", ours.gather_slots, 0),
        ("reduce slots", ours.reduce_slots, 0),
        ("sum slots", ours.sum_slots, 0),
    ]
    for name, mine, other in rows:
        if mine or other:
            table.add_row(name, human_bytes(mine), human_bytes(other) if other else "-", _ratio(mine, other))
    table.add_section()
    table.add_row("total", human_bytes(ours.total), human_bytes(theirs.total), _ratio(ours.total, theirs.total))
    return table


def traffic_table(plan: Plan, *, micro_batches: int = 1) -> Table:
    """Collectives and payload bytes of one optimizer step on one rank."""
    traffic = step_traffic(plan, micro_batches=micro_batches)
    table = Table(title=f"Traffic per step and rank, {micro_batches} micro-batch(es)")
    for name in ("collective", "calls", "payload"):
        table.add_column(name, justify="left" if name == "collective" else "right")
    for kind, nbytes in traffic.nbytes.items():
        table.add_row(kind, str(traffic.calls[kind]), human_bytes(nbytes))
    return table


def unit_table(plan: Plan) -> Table:
    """The units in order of use: parameters, dtype, whether sharded, slot."""
    table = Table(title="Units in order of use")
    for name in ("unit", "parameters", "dtypes", "rest", "slot"):
        table.add_column(name, justify="right" if name in ("parameters", "slot") else "left")
    for index in dict.fromkeys(plan.order):
        unit = plan.units[index]
        numel = sum(group.layout.parameter_numel for group in unit.groups)
        dtypes = ", ".join(dict.fromkeys(group.param.dtype for group in unit.groups)) or "-"
        slot = plan.gather_slots.of_unit[index]
        rest = ", ".join(_parts(plan, unit)) if unit.sharded else "whole"
        table.add_row(unit.label, f"{numel:,}", dtypes, rest, "-" if slot is None else str(slot))
    return table


def _parts(plan: Plan, unit: UnitPlan) -> dict[str, None]:
    """The shares of the parameters that rest on a rank, by group, each once."""
    return dict.fromkeys(f"1/{plan.mesh.size(unit.axes_of(group))}" for group in unit.groups)


def _ratio(mine: int, other: int) -> str:
    return f"{mine / other:.2f}" if other else "-"

"""What the ranks of a plan must have alike, as text that they compare.

Where state rests off the device, and what updates it there, is left out: hosts may differ in memory, threads and disks,
and nothing that is sent depends on it. Rejected: a digest alone, which says that plans differ and not in what.
"""

from __future__ import annotations

import zlib
from dataclasses import fields

from zeroshard.plan.groups import GroupPlan, UnitPlan
from zeroshard.plan.plan import Plan

_OF_THE_HOST = ("stream_numel", "pin_memory", "window_numel", "spill")
_LONGEST = 80


def agreed_text(plan: Plan) -> str:
    """The mesh, the policy and the units of a plan, a line each."""
    policy = [item.name for item in fields(plan.policy) if item.name not in _OF_THE_HOST]
    lines = [f"mesh: {plan.mesh}", *(f"{name}: {_short(getattr(plan.policy, name))}" for name in policy)]
    lines += [f"unit {unit.label}: {_unit_text(unit)}" for unit in plan.units]
    return "\n".join([*lines, f"order: {_short(plan.order)}", f"kept: {_short(plan.kept)}"])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({zlib.crc32(text.encode()):08x})"


def _unit_text(unit: UnitPlan) -> str:
    return f"over {'+'.join(unit.axes)}, " + "; ".join(_group_text(group) for group in unit.groups)


def _group_text(group: GroupPlan) -> str:
    layout, grad, moments = group.layout, group.grad, group.moments
    members = "".join(f"{segment.name}{list(segment.shape)}{segment.offset}" for segment in layout.segments)
    found = [f"{len(layout.segments)} parameters {zlib.crc32(members.encode()):08x} in {group.shown_dtype}"]
    if group.param.divided:
        found.append("divided")
    if grad is None:
        found.append("frozen")
    else:
        found.append(f"gradients {'divided' if grad.divided else 'whole'}, sent in {group.wire}")
        found.append("updated in parts" if group.update_axes else "updated whole")
        found.append(f"{0 if moments is None else moments.copies} moments")
    codes = (group.codes, group.differences, group.hops, group.owners, group.compressed, group.scale_block)
    codes = (*codes, group.factor_ranks) if group.factor_ranks else codes
    if any(codes):
        found.append(_short(codes))
    return ", ".join(found)

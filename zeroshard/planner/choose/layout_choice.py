"""Chooses a layout of those that fit, and says in a sentence why each other mesh was not chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroshard.mesh import Mesh
from zeroshard.plan.report import human_bytes
from zeroshard.planner.choose.choice import SAME_SPEED
from zeroshard.planner.predict.layouts import Layout, Layouts, TooLarge, short
from zeroshard.planner.predict.rows import SAFE_SHARE

WORTH_NAMING = 0.02
"""Share of a step from which on a wait is named."""


@dataclass(frozen=True)
class LayoutChoice:
    """The chosen layout (None if none fits), the best one of each mesh, the fastest first, and a sentence per mesh."""

    best: Layout | None
    of_mesh: tuple[Layout, ...]
    reasons: Mapping[Mesh, str]


def choose_layout(layouts: Layouts) -> LayoutChoice:
    """Choose the fastest layout with some memory to spare; of equally fast ones that with fewest axes, then bytes."""
    ranked = sorted(layouts.found, key=lambda layout: (_tight(layout), layout.seconds))
    of_mesh: dict[Mesh, Layout] = {}
    for layout in ranked:
        before = of_mesh.get(layout.mesh)
        if before is None or (_alike(before, layout) and layout.row.total < before.row.total):
            of_mesh[layout.mesh] = layout
    found = sorted(of_mesh.values(), key=lambda layout: (_tight(layout), layout.seconds))
    best = None
    if found:
        close = [layout for layout in found if _alike(found[0], layout)]
        best = min(close, key=lambda layout: (_axes(layout.mesh), layout.row.total))
    reasons = {layout.mesh: _reason(layout, best) for layout in found}
    reasons |= {large.mesh: _too_large(large) for large in layouts.too_large}
    return LayoutChoice(best, tuple(found), reasons)


def _alike(first: Layout, other: Layout) -> bool:
    return _tight(first) == _tight(other) and other.seconds <= first.seconds * (1 + SAME_SPEED)


def _tight(layout: Layout) -> bool:
    return layout.row.total > SAFE_SHARE * layout.row.cluster.gpu.memory


def _axes(mesh: Mesh) -> int:
    return sum(axis.size > 1 for axis in mesh.axes)


def _reason(layout: Layout, best: Layout | None) -> str:
    waits = _waits(layout)
    if best is None or layout is best:
        room = human_bytes(layout.row.cluster.gpu.memory - layout.row.total)
        return f"The choice: nothing that fits with some room is faster, and {room} stay free{_listed(waits)}."
    slower = layout.seconds / best.seconds - 1
    if _tight(layout) and not _tight(best):
        room = human_bytes(layout.row.cluster.gpu.memory - layout.row.total)
        return f"Fits with only {room} to spare, which fragmentation may eat; {slower:+.0%} time per step."
    if abs(slower) <= SAME_SPEED:
        return f"As fast as the choice, with {_axes(layout.mesh)} axes and {human_bytes(layout.row.total)}."
    return f"{slower:.0%} slower than the choice{_listed(waits)}."


def _waits(layout: Layout) -> list[tuple[float, str]]:
    """What a step waits for besides the kernels of one rank, as shares of the step, and in words."""
    found = [(layout.bubble, "stages wait for each other {} of the step")]
    found += [
        (seconds / layout.seconds, f"what goes over {axis!r} takes {{}} of it")
        for axis, seconds in layout.sent_seconds.items()
    ]
    exposed = layout.row.time.exposed if layout.pipeline is None else 0.0
    found.append((exposed / layout.seconds, "compute waits {} of it for gathers, sums or the host"))
    return sorted((one for one in found if one[0] >= WORTH_NAMING), reverse=True)


def _listed(waits: Sequence[tuple[float, str]]) -> str:
    if not waits:
        return ""
    words = [text.format(f"{share:.0%}") for share, text in waits]
    return ": " + ", ".join([words[0].replace("of it", "of the step"), *words[1:]])


def _too_large(large: TooLarge) -> str:
    kind, nbytes = max(large.memory.peak.nbytes.items(), key=lambda item: item[1])
    return (
        f"Does not fit: at least {human_bytes(large.total)} ({large.setting.label}), most of it {kind} "
        f"({human_bytes(nbytes)}), at the {large.memory.peak.label}."
    )


def refusals(layouts: Layouts) -> list[str]:
    """Why meshes are left out: each reason once, with the number of its meshes."""
    return [
        f"{len(meshes)} {'mesh' if len(meshes) == 1 else 'meshes'}, {short(meshes[0])} say: {why}."
        for why, meshes in layouts.refused.items()
    ]

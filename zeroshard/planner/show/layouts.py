"""Shows layouts as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from zeroshard.mesh import Mesh
from zeroshard.planner.choose.layout_choice import LayoutChoice, refusals
from zeroshard.planner.predict.layouts import Layout, Layouts, TooLarge, short
from zeroshard.planner.show.tables import columns
from zeroshard.planner.trace.checkpointing import Checkpointing

SHOWN = 24
"""The number of meshes in the table, the fastest ones."""
_AXES = ("pp", "dp_replicate", "dp_shard", "sp", "ep", "tp")
_HEADS = ("pp", "replicas", "dp", "sp", "ep", "tp")
_NUMBERS = ("state", "activ.", "total", "bubble", "sent", "step s", "tok/s", "MFU", "$/1B")


def layout_table(layouts: Layouts, choice: LayoutChoice, title: str) -> Group:
    """A table with the fastest meshes, a sentence for each below it, and what is left out."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for name in ("", *_HEADS, "stage", "ckpt", "x", "schedule"):
        table.add_column(name, no_wrap=True, justify="left")
    for name in _NUMBERS:
        table.add_column(name, no_wrap=True, justify="right")
    shown = choice.of_mesh[:SHOWN]
    for layout in shown:
        best = layout is choice.best
        table.add_row(*_cells(layout, best), style="bold green" if best else "")
    notes = Text()
    for layout in shown:
        notes.append(f"{layout.label}: ", style="bold" if layout is choice.best else "")
        notes.append(f"{choice.reasons[layout.mesh]}\n")
    for line in _left_out(layouts, choice):
        notes.append(f"{line}\n", style="dim")
    units = (
        "GB of 1e9 bytes per GPU; x: micro-batches a step; bubble: share of the step in which stages wait for each "
        "other; sent: share in which compute waits for collectives of tp, sp and ep.\n"
    )
    return Group(Text(title, style="italic"), table, Text(units, style="dim"), notes)


def _cells(layout: Layout, best: bool) -> list[str]:
    sizes = {axis.name: axis.size for axis in layout.mesh.axes}
    setting, cost = layout.row.setting, layout.cost_per_billion
    held = columns(layout.row)
    state = sum(held[name] for name in ("param", "grad", "master", "moments"))
    return [
        "->" if best else "",
        *(str(sizes[axis]) if sizes[axis] > 1 else "-" for axis in _AXES),
        str(setting.stage),
        setting.checkpointing.value if setting.checkpointing is not Checkpointing.OFF else "off",
        str(layout.row.micro_batches),
        layout.schedule or "-",
        f"{state / 1e9:.1f}",
        f"{(held['activ.'] + held['logits']) / 1e9:.1f}",
        f"{layout.row.total / 1e9:.1f}",
        f"{layout.bubble:.1%}" if layout.pipeline is not None else "-",
        f"{_sent(layout):.0%}" if layout.sent_seconds else "-",
        f"{layout.seconds:.3g}",
        f"{layout.tokens_per_second:,.0f}",
        f"{_mfu(layout):.0%}",
        "-" if cost is None else f"{cost:,.0f}",
    ]


def _sent(layout: Layout) -> float:
    return sum(layout.sent_seconds.values()) / layout.seconds


def _mfu(layout: Layout) -> float:
    return layout.row.mfu * layout.row.time.seconds / layout.seconds


def _left_out(layouts: Layouts, choice: LayoutChoice) -> list[str]:
    lines: list[str] = []
    rest = choice.of_mesh[SHOWN:]
    if rest:
        lines.append(f"{len(rest)} further meshes fit and are slower; --json has all.")
    if layouts.too_large:
        nearest = min(layouts.too_large, key=lambda one: one.total)
        why = choice.reasons[nearest.mesh]
        lines.append(
            f"Meshes on which nothing fits: {len(layouts.too_large)}. The nearest, {short(nearest.mesh)}: {why}"
        )
    return [*lines, *refusals(layouts)]


def layouts_json(layouts: Layouts, choice: LayoutChoice, notes: Sequence[str]) -> dict[str, Any]:
    """All layouts as JSON values, in bytes and seconds."""
    return {
        "choice": None if choice.best is None else _named(choice.best),
        "layouts": [_layout(layout, choice) for layout in layouts.found],
        "too_large": [_large(one, choice) for one in layouts.too_large],
        "refused": [{"why": why, "meshes": [_mesh(m) for m in meshes]} for why, meshes in layouts.refused.items()],
        "notes": list(notes),
    }


def _mesh(mesh: Mesh) -> dict[str, int]:
    return {axis.name: axis.size for axis in mesh.axes}


def _named(layout: Layout) -> dict[str, Any]:
    return {
        "mesh": _mesh(layout.mesh),
        "stage": layout.row.setting.stage,
        "checkpointing": layout.row.setting.checkpointing.value,
        "schedule": layout.schedule or None,
        "micro_batches": layout.row.micro_batches,
    }


def _layout(layout: Layout, choice: LayoutChoice) -> dict[str, Any]:
    row = layout.row
    return {
        **_named(layout),
        "chosen": layout is choice.best,
        "best_of_mesh": layout in choice.of_mesh,
        "why": choice.reasons[layout.mesh] if layout in choice.of_mesh else None,
        "device_bytes": {**columns(row), "total": row.total},
        "peak": {"moment": row.memory.peak.label, "bytes": dict(row.memory.peak.nbytes)},
        "bubble": layout.bubble,
        "sent_seconds": layout.sent_seconds,
        "step_seconds": layout.seconds,
        "tokens_per_second_per_gpu": layout.tokens_per_second,
        "mfu": _mfu(layout),
        "usd_per_1e9_tokens": layout.cost_per_billion,
    }


def _large(one: TooLarge, choice: LayoutChoice) -> dict[str, Any]:
    return {
        "mesh": _mesh(one.mesh),
        "stage": one.setting.stage,
        "checkpointing": one.setting.checkpointing.value,
        "total_bytes": one.total,
        "why": choice.reasons[one.mesh],
    }

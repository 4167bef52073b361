"""Shows rows as a table and as JSON. Sizes in the table are GB of 1e9 bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from zeroshard.plan.policy import HostUpdate
from zeroshard.plan.report import human_bytes
from zeroshard.planner.choose.choice import Choice
from zeroshard.planner.predict.links import link_traffic
from zeroshard.planner.predict.rows import Row
from zeroshard.planner.predict.scale import Strategy
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "param": ("parameters",),
    "grad": ("gradients", "local gradients"),
    "master": ("master weights",),
    "moments": ("moments",),
    "activ.": ("activations", "backward", "inputs"),
    "logits": ("logits and loss",),
    "slots": ("slots", "workspaces", "rounding"),
}
"""Columns of device memory, and the kinds of `predict.memory.KINDS` that each adds up."""
PARTS = (*COLUMNS, "reserve")
NARROWER: tuple[tuple[str, ...], ...] = (PARTS, ("by", "MFU"), ("disk",), ("$/1B",), ("ratio",), ("tok/s",), ("host",))
"""Columns that a narrow terminal leaves out, the first ones first; the parts of the total are left out together."""
GAP = 2
LEFT = ("", "stage", "offload", "ratio", "by", "ckpt")
"""Columns that are aligned on the left; the others are numbers."""


def columns(row: Row) -> dict[str, int]:
    """Device bytes at the peak by column, with the reserve."""
    nbytes = row.memory.peak.nbytes
    found = {name: sum(nbytes.get(kind, 0) for kind in kinds) for name, kinds in COLUMNS.items()}
    return {**found, "reserve": row.reserve}


def plan_table(rows: Sequence[Row], choice: Choice, title: str, width: int) -> Group:
    """The table, one line per row in `width` characters, and a sentence for each row below it.

    Columns that do not fit are left out and named; no number is cut off.
    """
    cells = [_cells(row, row is choice.row) for row in rows]
    kept, left_out = _that_fit(cells, width)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP // 2))
    for name in kept:
        table.add_column(name, no_wrap=True, justify="left" if name in LEFT else "right")
    for row, values in zip(rows, cells, strict=True):
        best = row is choice.row
        style = "bold green" if best else "" if row.fits and row.runs else "dim"
        table.add_row(*(values[name] for name in kept), style=style)
    units = "GB of 1e9 bytes per GPU; host and disk per node; tok/s per GPU.\n"
    if left_out:
        units += f"Left out, since the window is too narrow: {', '.join(left_out)}. A pipe has all.\n"
    notes = Text()
    for row in rows:
        notes.append(f"{row.setting.label}: ", style="bold" if row is choice.row else "")
        notes.append(f"{choice.reasons[row.setting]}\n")
    return Group(Text(title, style="italic"), table, Text(units, style="dim"), notes)


def _that_fit(rows: Sequence[Mapping[str, str]], width: int) -> tuple[list[str], list[str]]:
    """Names of the columns that fit in `width` characters, and of those that do not."""
    kept, left_out = list(rows[0]), list[str]()
    for names in NARROWER:
        widths = [max(len(name), *(len(row[name]) for row in rows)) for name in kept]
        if sum(widths) + GAP * (len(kept) - 1) <= width:
            break
        kept = [name for name in kept if name not in names]
        left_out += names
    return kept, left_out


def _cells(row: Row, best: bool) -> dict[str, str]:
    """The cells of a line by column, from left to right."""
    cost = row.cost_per_billion
    how = "off" if row.setting.checkpointing is Checkpointing.OFF else row.setting.checkpointing.value
    fits = ("yes" if row.runs else "later") if row.fits else "no"
    return {
        "": "->" if best else "",
        "stage": str(row.setting.stage),
        "offload": row.setting.offload.value if row.setting.offload is not Offload.NONE else "-",
        "ratio": f"{row.setting.ratio:.0%}" if row.setting.offload is not Offload.NONE else "-",
        "by": _updater(row),
        "ckpt": how,
        **{name: _gb(nbytes) for name, nbytes in columns(row).items()},
        "total": _gb(row.total),
        "fits": fits,
        "host": _gb(row.host) if row.host else "-",
        "disk": _gb(row.disk) if row.disk else "-",
        "step s": f"{row.time.seconds:.3g}",
        "tok/s": f"{row.tokens_per_second:,.0f}",
        "MFU": f"{row.mfu:.0%}",
        "$/1B": "-" if cost is None else f"{cost:,.0f}",
    }


def _updater(row: Row) -> str:
    """Which device updates the state that rests off the device."""
    names = {HostUpdate.PROCESSOR: "cpu", HostUpdate.STREAMED: "gpu"}
    return "+".join(names[update] for update in HostUpdate if update in row.plan.updates) or "-"


def scale_table(strategies: Sequence[Strategy], title: str) -> Group:
    """A table of strategies for clusters of several sizes, one line each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GPUs", justify="right")
    table.add_column("strategy", no_wrap=True)
    for name in ("step s", "tok/s/GPU", "GB/GPU", "fits"):
        table.add_column(name, justify="right")
    table.add_column("", overflow="fold")
    best = {
        size: max(
            (strategy.tokens_per_second for strategy in strategies if strategy.gpus == size and strategy.fits),
            default=0.0,
        )
        for size in dict.fromkeys(strategy.gpus for strategy in strategies)
    }
    for strategy in strategies:
        remark = strategy.remark if strategy.executed else ", ".join(filter(None, [strategy.remark, "not executed"]))
        cells = [
            f"{strategy.gpus:,}",
            strategy.name,
            f"{strategy.seconds:.3g}",
            f"{strategy.tokens_per_second:,.0f}",
            _gb(strategy.memory),
        ]
        fastest = strategy.fits and strategy.tokens_per_second == best[strategy.gpus]
        table.add_row(*cells, "yes" if strategy.fits else "no", remark, style="bold green" if fastest else "")
    return Group(Text(title, style="italic"), table)


def as_json(rows: Sequence[Row], choice: Choice, notes: Sequence[str], advised: Sequence[str]) -> dict[str, Any]:
    """The table and the figures that it is made of as JSON values, in bytes and seconds."""
    return {
        "choice": None if choice.row is None else _setting(choice.row),
        "rows": [_row(row, choice) for row in rows],
        "advice": list(advised),
        "notes": list(notes),
    }


def _setting(row: Row) -> dict[str, Any]:
    setting = row.setting
    return {
        "stage": setting.stage,
        "offload": setting.offload.value,
        "ratio": setting.ratio,
        "checkpointing": setting.checkpointing.value,
        "updated_by": "+".join(update.value for update in HostUpdate if update in row.plan.updates) or None,
    }


def _row(row: Row, choice: Choice) -> dict[str, Any]:
    return {
        **_setting(row),
        "chosen": row is choice.row,
        "why": choice.reasons[row.setting],
        "fits": row.fits,
        "runs": row.runs,
        "refused": row.refused or None,
        "device_bytes": {**columns(row), "total": row.total, "allocated": row.memory.peak.total},
        "peak": {"moment": row.memory.peak.label, "bytes": dict(row.memory.peak.nbytes)},
        "state_bytes": {
            "device": dict(row.memory.tiers.device),
            "host": dict(row.memory.tiers.host),
            "nvme": dict(row.memory.tiers.nvme),
        },
        "host_bytes_per_node": row.host,
        "disk_bytes_per_node": row.disk,
        "traffic_bytes": link_traffic(row),
        "step_seconds": row.time.seconds,
        "time": {"compute": row.time.compute, "busy": row.time.busy, "waiting": row.time.exposed},
        "tokens_per_second_per_gpu": row.tokens_per_second,
        "mfu": row.mfu,
        "hours_per_1e9_tokens": row.hours_per_billion,
        "usd_per_1e9_tokens": row.cost_per_billion,
        "parameters": row.plan.parameter_numel,
    }


def traffic_text(row: Row) -> str:
    """Bytes over each link per step and GPU, in a line."""
    found = [f"{human_bytes(nbytes)} over {link}" for link, nbytes in link_traffic(row).items() if nbytes]
    return f"Traffic of a step and GPU: {', '.join(found) or 'none'}."


def _gb(nbytes: int) -> str:
    size = nbytes / 1e9
    return f"{size:.2f}" if size < 10 else f"{size:.1f}" if size < 1000 else f"{size:,.0f}"

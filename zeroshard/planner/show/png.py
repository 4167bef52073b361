"""Draws the memory charts as a picture, with matplotlib, which is not a dependency."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.planner.choose.choice import Choice
from zeroshard.planner.predict.rows import Row
from zeroshard.planner.show.charts import COLOURS, LONG_NAMES, STACK, memory_series, scale_of
from zeroshard.planner.show.tables import columns


def write_png(path: Path, rows: Sequence[Row], choice: Choice, title: str) -> None:
    """Draw the bars of all rows, and the memory of the choice over a step.

    Raises:
        PlanError: matplotlib is not installed.
    """
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise PlanError("--png needs matplotlib: pip install matplotlib") from error
    shown = choice.row or min(rows, key=lambda row: row.total)
    figure = figure_module.Figure(figsize=(11, 3.2 + 0.32 * len(rows) + 3.2), layout="constrained")
    bars, area = figure.subplots(2, 1, height_ratios=[0.32 * len(rows) + 1, 3.2])
    figure.suptitle(title, fontsize=11)
    _draw_bars(bars, rows, choice)
    _draw_area(area, shown)
    figure.savefig(path, format="png", dpi=120)


def _draw_bars(axes: Any, rows: Sequence[Row], choice: Choice) -> None:
    labels = [("> " if row is choice.row else "") + row.setting.label for row in rows]
    left = [0.0] * len(rows)
    for name, colour in COLOURS.items():
        widths = [columns(row)[name] / 1e9 for row in rows]
        axes.barh(range(len(rows)), widths, left=left, color=colour, label=LONG_NAMES[name])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.axvline(rows[0].cluster.gpu.memory / 1e9, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, scale_of(rows) / 1e9)
    axes.set_xlabel("GB per GPU; the line is the card's memory")
    axes.legend(fontsize=7, ncols=4, loc="lower right")


def _draw_area(axes: Any, row: Row) -> None:
    series = memory_series(row)
    layers = [[value / 1e9 for value in layer] for layer in series.layers]
    colours = [COLOURS[name] for name in STACK]
    axes.stackplot(range(len(series.labels)), layers, colors=colours, step="mid")
    axes.set_title(f"one step: {row.setting.label}", fontsize=9)
    axes.set_ylabel("GB")
    axes.set_xticks([0, len(series.labels) - 1], ["forward", "optimizer step"])

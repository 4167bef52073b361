"""The loss curve of a run as a PNG: train and held-out loss by step, and where the run was stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from smooth import Smooth

TRAIN, HELD_OUT, MARK = "#2a6fbb", "#d1495b", "#666666"


def draw_losses(metrics: Path, picture: Path, resumed_at: int) -> tuple[float, float]:
    """Draws `picture` from the JSON lines of `metrics` and gives the first and the last held-out loss."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held_out = [(row["step"], row["held_out"]) for row in rows if "held_out" in row]

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes.plot(*zip(*train, strict=True), color=TRAIN, alpha=0.3, linewidth=0.8)
    axes.plot(*zip(*_smooth(train), strict=True), color=TRAIN, linewidth=1.8, label="train (smoothed)")
    axes.plot(*zip(*held_out, strict=True), color=HELD_OUT, marker="o", markersize=4, linewidth=1.8, label="held out")
    axes.axvline(resumed_at, color=MARK, linestyle="--", linewidth=1)
    axes.annotate(
        f"stopped and resumed at step {resumed_at}",
        (resumed_at, axes.get_ylim()[1]),
        xytext=(5, -12),
        textcoords="offset points",
        color=MARK,
        fontsize=9,
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"held-out loss {held_out[0][1]:.2f} → {held_out[-1][1]:.2f}", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture)
    pyplot.close(figure)
    return held_out[0][1], held_out[-1][1]


def _smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    smooth = Smooth()
    return [(step, smooth.add(loss)) for step, loss in points]

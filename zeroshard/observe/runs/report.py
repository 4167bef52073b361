"""`zeroshard report`: one HTML page with the curves of a run, which needs no network and no script.

Each curve is a drawing of at most as many points as it is wide; a point stands for a stretch of steps, and a band shows
the least and the most of it, so a spike of one step is seen. Rejected: a charting library, which would have to be
inlined at a thousand times the size of what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from zeroshard.observe.host import BETWEEN
from zeroshard.observe.record import StepRecord
from zeroshard.observe.runs.compare import Comparison
from zeroshard.observe.runs.components import parts_of
from zeroshard.observe.runs.explain import FINDING, explain, findings
from zeroshard.observe.runs.log import Run
from zeroshard.observe.times import PARTS

WIDTH, HEIGHT, LEFT, BOTTOM = 520, 190, 70, 24
_POINTS = 300
_MOST_RANKS = 4
"""Curves of ranks in one drawing, those that need the most."""
_COLOURS = ("#3b6fb6", "#2a9d8f", "#d9822b", "#9a86c8")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1500px; padding: 0 1rem; color: #1c2733; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1.5rem; }
figure { margin: 0; } svg { width: 100%; height: auto; }
pre { background: #f3f5f8; padding: 1rem; white-space: pre-wrap; }
ol { background: #fdf3e7; border-left: 4px solid #d9822b; padding: 1rem 1rem 1rem 2.5rem; margin: 0 0 1rem; }
figcaption { font-weight: 600; } text { font: 11px system-ui, sans-serif; fill: #57636f; }
"""
Value = Callable[[StepRecord], "float | None"]


def report(run: Run, title: str, ranks: Mapping[int, Run] | None = None) -> str:
    """The page; `ranks` are the logs of all ranks, where they are there."""
    figures = [
        _figure(run, "Loss", {"loss": lambda step: step.loss}),
        _figure(run, "Gradient norm before clipping", {"norm": lambda step: step.norm}),
        _figure(run, "Learning rate", {"rate": lambda step: step.rates[0] if step.rates else None}),
        _figure(run, "Loss scale", {"scale": lambda step: step.scale}),
        _figure(run, "Samples per second", {"samples/s": _rate}),
        _figure(run, "Seconds of a step", {part: _part(part) for part in (*PARTS, BETWEEN)}),
        _figure(run, "Steps not applied so far", {"skipped": lambda step: float(step.skipped)}),
        _figure(run, "Seconds of a step without waits for other ranks", _own(ranks or {0: run})),
    ]
    wrong = "".join(f"<li>{escape(finding.text)}</li>" for finding in findings(ranks or {0: run}))
    found = f"<ol>{wrong}</ol>" if wrong else ""
    text = escape("\n".join(line for line in explain(run, ranks) if not line.startswith(FINDING)))
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1>{found}<pre>{text}</pre><main>{''.join(figures)}</main></html>\n"
    )


def _own(ranks: Mapping[int, Run]) -> dict[str, Value]:
    """A curve for each of the ranks that need the most; none where there is one log."""
    if len(ranks) < 2:
        return {}
    compared = Comparison(ranks)
    needed = sorted(compared.sides, key=lambda rank: -sum(compared.sides[rank].own))[:_MOST_RANKS]
    own = {rank: dict(zip(compared.numbers, compared.sides[rank].own, strict=True)) for rank in sorted(needed)}
    return {f"rank {rank}": lambda step, of=seconds: of.get(step.step) for rank, seconds in own.items()}


def _rate(step: StepRecord) -> float | None:
    return step.batch / step.whole if step.whole else None


def _part(part: str) -> Value:
    return lambda step: parts_of(step)[part] if step.whole is not None else None


def _figure(run: Run, caption: str, curves: dict[str, Value]) -> str:
    """A drawing of curves over steps; nothing where none of them has a point."""
    found = {name: _points(run.steps, value) for name, value in curves.items()}
    every = [point for points in found.values() for point in points]
    if not every:
        return ""
    low = min(point[1] for point in every)
    high = max(point[3] for point in every)
    first, last = run.steps[0].step, run.steps[-1].step

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 16) * (value - low) / ((high - low) or 1.0)

    drawn = "".join(
        _curve([(x(s), y(least), y(mean), y(most)) for s, least, mean, most in points], name, number)
        for number, (name, points) in enumerate(found.items())
    )
    marks = "".join(f"<text x='4' y='{y(value) + 4:.1f}'>{value:.4g}</text>" for value in {low, high})
    steps = f"<text x='{LEFT}' y='{HEIGHT - 6}'>step {first}</text>"
    steps += f"<text x='{WIDTH - 10}' y='{HEIGHT - 6}' text-anchor='end'>{last}</text>"
    box = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(caption)}'>"
    return f"<figure><figcaption>{escape(caption)}</figcaption>{box}{marks}{steps}{drawn}</svg></figure>"


def _curve(points: Sequence[tuple[float, float, float, float]], name: str, number: int) -> str:
    colour = _COLOURS[number % len(_COLOURS)]
    line = " ".join(f"{x:.1f},{mean:.1f}" for x, _, mean, _ in points)
    band = " ".join(f"{x:.1f},{most:.1f}" for x, _, _, most in points)
    band += " " + " ".join(f"{x:.1f},{least:.1f}" for x, least, _, _ in reversed(points))
    label = f"<text x='{LEFT + 90 * number}' y='10' style='fill:{colour}'>{escape(name)}</text>"
    return (
        f"<polygon points='{band}' fill='{colour}' opacity='0.2'/>"
        f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='1.5'/>{label}"
    )


def _points(steps: Sequence[StepRecord], value: Value) -> list[tuple[float, float, float, float]]:
    """Step, least, mean and most of each stretch; what is not finite is left out."""
    found = [(step.step, number) for step in steps if (number := value(step)) is not None and math.isfinite(number)]
    size = max(1, -(-len(found) // _POINTS))
    points: list[tuple[float, float, float, float]] = []
    for start in range(0, len(found), size):
        part = found[start : start + size]
        numbers = [number for _, number in part]
        points.append((part[-1][0], min(numbers), sum(numbers) / len(numbers), max(numbers)))
    return points

"""Writes the report: one page without network access or scripts, with bars per configuration and a step's timelines.

Bars are plain boxes, which narrow with the screen; the two timelines are SVG drawings, which scale. Rejected: a
charting library, which would have to be inlined and is a thousand times larger than the drawings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from zeroshard.plan.report import human_bytes
from zeroshard.planner.choose.choice import Choice
from zeroshard.planner.predict.rows import Row
from zeroshard.planner.predict.timeline import Span
from zeroshard.planner.show.charts import (
    COLOURS,
    LONG_NAMES,
    STACK,
    TIME_COLOURS,
    memory_series,
    scale_of,
    time_series,
)
from zeroshard.planner.show.tables import columns

WIDTH, HEIGHT, LEFT, BOTTOM = 1000, 360, 60, 40
LANE = 34
MAX_POINTS = 400
STREAM_COLOURS = {
    "compute": "#3b6fb6",
    "gather": "#2a9d8f",
    "reduce": "#d9822b",
    "copies": "#9a86c8",
    "cpu": "#b3554a",
    "windows": "#8a7a5c",
}


def report(rows: Sequence[Row], choice: Choice, title: str, notes: Sequence[str]) -> str:
    """The page as text.

    Args:
        notes: advice and assumptions, shown at the end.
    """
    shown = choice.row or min(rows, key=lambda row: row.total)
    gpu = shown.cluster.gpu
    template = Template((files("zeroshard.planner") / "data" / "report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        subtitle=f"{escape(gpu.name)}: {human_bytes(gpu.memory)} per GPU. Sizes in GB of 1e9 bytes.",
        verdict=_verdict(choice),
        legend="".join(_key(LONG_NAMES[name], colour) for name, colour in COLOURS.items()),
        bars="".join(_bar(row, choice, scale_of(rows)) for row in rows),
        shown=escape(shown.setting.label),
        memory=_memory(shown),
        seconds=f"{shown.time.seconds:.3g} s",
        time_legend=_time_legend(shown),
        time=_time(shown),
        streams=_streams(shown),
        table=_table(rows, choice),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes),
    )


def _verdict(choice: Choice) -> str:
    if choice.row is None:
        return '<div class="verdict none">Nothing that this version executes fits.</div>'
    row = choice.row
    cost = row.cost_per_billion
    price = "" if cost is None else f", {cost:,.0f} USD per 1e9 tokens"
    return (
        f'<div class="verdict"><b>{escape(row.setting.label)}</b>: {human_bytes(row.total)} per GPU, '
        f"{row.time.seconds:.3g} s per step, {row.tokens_per_second:,.0f} tokens/s per GPU, MFU {row.mfu:.0%}{price}."
        f"<br>{escape(choice.reasons[row.setting])}</div>"
    )


def _key(name: str, colour: str) -> str:
    return f'<li><i style="background:{colour}"></i>{escape(name)}</li>'


def _bar(row: Row, choice: Choice, scale: float) -> str:
    kind = "chosen" if row is choice.row else "no" if not row.fits else "later" if not row.runs else ""
    parts = "".join(
        f'<span style="width:{100 * nbytes / scale:.3f}%;background:{COLOURS[name]}" '
        f'title="{LONG_NAMES[name]}: {human_bytes(nbytes)}"></span>'
        for name, nbytes in columns(row).items()
        if nbytes
    )
    limit = 100 * row.cluster.gpu.memory / scale
    where = "".join(
        f", {human_bytes(nbytes)} on {tier}" for tier, nbytes in (("the host", row.host), ("disk", row.disk)) if nbytes
    )
    return (
        f'<div class="config {kind}"><div class="head"><b>{escape(row.setting.label)}</b>'
        f'<span class="num">{human_bytes(row.total)}{where}, {row.time.seconds:.3g} s</span></div>'
        f'<div class="track"><div class="bar">{parts}</div><div class="limit" style="left:{limit:.3f}%"></div></div>'
        f'<div class="why">{escape(choice.reasons[row.setting])}</div></div>'
    )


def _memory(row: Row) -> str:
    """A stacked area over the segments of a step, with the card's memory as a line."""
    series = memory_series(row)
    capacity = row.cluster.gpu.memory
    top = max([*series.tops, capacity * 0.1]) * 1.08
    count = len(series.labels)
    # Each segment is a step of the area, as high as its peak.
    xs = [LEFT + (WIDTH - LEFT) * index / count for index in range(count + 1)]
    base = [0.0] * count
    shapes: list[str] = []
    for name, layer in zip(STACK, series.layers, strict=True):
        above = [low + value for low, value in zip(base, layer, strict=True)]
        upper = [(x, _y(value, top)) for i, value in enumerate(above) for x in (xs[i], xs[i + 1])]
        lower = [(x, _y(value, top)) for i, value in enumerate(base) for x in (xs[i], xs[i + 1])]
        shapes.append(f'<path fill="{COLOURS[name]}" d="{_path([*upper, *reversed(lower)])}"/>')
        base = above
    peak = max(range(count), key=lambda index: series.tops[index])
    at = xs[peak]
    anchor = "end" if at > WIDTH * 0.6 else "start"
    marks = "".join(_tick(value, top) for value in _ticks(top))
    line = "" if capacity > top else f'<path class="capacity" d="M{LEFT} {_y(capacity, top):.1f}H{WIDTH}"/>'
    label = f"peak {human_bytes(series.tops[peak])}: {series.labels[peak]}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory over one step">'
        f"{marks}{''.join(shapes)}{line}"
        f'<text x="{at:.0f}" y="16" text-anchor="{anchor}">{escape(label)}</text>'
        f'<text class="soft" x="{LEFT}" y="{HEIGHT - 10}">forward</text>'
        f'<text class="soft" x="{WIDTH - 6}" y="{HEIGHT - 10}" text-anchor="end">backward, optimizer step</text></svg>'
    )


def _y(value: float, top: float) -> float:
    return (HEIGHT - BOTTOM) * (1 - value / top)


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "Z"


def _ticks(top: float) -> list[float]:
    step = 10 ** len(str(int(top / 1e9))) / 10 * 1e9
    while top / step > 6:
        step *= 2
    while top / step < 2.5:
        step /= 2
    return [step * index for index in range(1, int(top / step) + 1)]


def _tick(value: float, top: float) -> str:
    y = _y(value, top)
    return (
        f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH}"/>'
        f'<text class="soft" x="{LEFT - 6}" y="{y + 5:.1f}" text-anchor="end">{value / 1e9:g}</text>'
    )


def _time_legend(row: Row) -> str:
    return "".join(
        _key(f"{name}: {1e3 * seconds:,.{0 if seconds > 0.1 else 1}f} ms", TIME_COLOURS[index % len(TIME_COLOURS)])
        for index, (name, seconds) in enumerate(time_series(row))
    )


def _time(row: Row) -> str:
    whole = sum(seconds for _, seconds in time_series(row)) or 1.0
    parts = "".join(
        f'<span style="width:{100 * seconds / whole:.3f}%;background:{TIME_COLOURS[index % len(TIME_COLOURS)]}" '
        f'title="{escape(name)}"></span>'
        for index, (name, seconds) in enumerate(time_series(row))
    )
    return f'<div class="track"><div class="bar">{parts}</div></div>'


def _streams(row: Row) -> str:
    """A lane for each stream that works, over one step."""
    lanes = [stream for stream in STREAM_COLOURS if row.time.busy.get(stream)]
    height = LANE * len(lanes) + 30
    width = WIDTH - 90
    shapes: list[str] = []
    for number, stream in enumerate(lanes):
        y = 6 + number * LANE
        shapes.append(f'<text x="4" y="{y + 19}">{stream}</text>')
        for span in _merged([s for s in row.time.spans if s.stream == stream], row.time.seconds / MAX_POINTS):
            x = 90 + width * max(0.0, span.start) / row.time.seconds
            length = max(0.6, width * (span.end - max(0.0, span.start)) / row.time.seconds)
            if x < WIDTH:
                shapes.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{min(length, WIDTH - x):.1f}" height="{LANE - 8}" '
                    f'fill="{STREAM_COLOURS[stream]}"><title>{escape(span.label)}</title></rect>'
                )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="streams over one step">{"".join(shapes)}'
        f'<text class="soft" x="90" y="{height - 6}">0</text>'
        f'<text class="soft" x="{WIDTH - 4}" y="{height - 6}" text-anchor="end">{row.time.seconds:.3g} s</text></svg>'
    )


def _merged(spans: list[Span], gap: float) -> list[Span]:
    """Spans that nearly touch are joined, so that a page with a thousand kernels stays small."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        last = found[-1] if found else None
        if last is not None and span.start - last.end < gap / 4 and span.end - last.start < 2 * gap:
            found[-1] = Span(last.stream, last.label, last.start, max(last.end, span.end))
        else:
            found.append(span)
    return found


def _table(rows: Sequence[Row], choice: Choice) -> str:
    names = [*COLOURS, "total"]
    headings = ["configuration", *names, "host", "disk", "step s", "tokens/s", "MFU", "USD/1e9"]
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(_line(row, choice) for row in rows)}</tbody></table>"


def _line(row: Row, choice: Choice) -> str:
    cost = row.cost_per_billion
    cells = [
        escape(row.setting.label),
        *(f"{nbytes / 1e9:.2f}" for nbytes in (*columns(row).values(), row.total, row.host, row.disk)),
        f"{row.time.seconds:.4g}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.mfu:.0%}",
        "-" if cost is None else f"{cost:,.0f}",
    ]
    kind = ' class="chosen"' if row is choice.row else ""
    return f"<tr{kind}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"

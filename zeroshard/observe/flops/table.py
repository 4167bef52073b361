"""A count of FLOPs in words: numbers with their units, and the modules that do most of the work, level by level."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def in_words(number: float, unit: str = "") -> str:
    """Three digits and a prefix: '1.82 GFLOPs'."""
    for size, prefix in _STEPS:
        if number >= size:
            return f"{number / size:.2f} {prefix}{unit}"
    return f"{number:.2f} {unit}".rstrip()


def module_lines(by_module: Mapping[str, int], *, depth: int, top: int, detailed: bool) -> Iterator[str]:
    """The `top` modules of each level down to `depth` (-1: all), and with `detailed` the tree of all of them."""
    names = [name for name in by_module if by_module[name]]
    levels = {name: name.count(".") for name in names}
    deepest = max(levels.values(), default=0)
    limit = deepest if depth < 0 else min(depth, deepest)
    for level in range(limit + 1):
        best = sorted((n for n in names if levels[n] == level), key=lambda n: (-by_module[n], n))[:top]
        told = ", ".join(f"{name} {in_words(by_module[name], 'FLOPs')}" for name in best)
        if told:
            yield f"level {level}: {told}"
    if detailed:
        yield from _tree(by_module, (name for name in names if levels[name] <= limit))


def _tree(by_module: Mapping[str, int], names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield f"{'  ' * name.count('.')}{name.rpartition('.')[2]}  {in_words(by_module[name], 'FLOPs')}"

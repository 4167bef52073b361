"""What an unknown key was probably meant to be.

First the same name at another level (the commonest mistake: a key put beside its section), then a similar name in the
same section, then a similar name anywhere, then names of the section that begin so.
"""

from __future__ import annotations

import difflib

from zeroshard.config.components import OPTIMIZERS, SCHEDULERS
from zeroshard.config.keys import ANY_NAME, KeyTable, Status

_MOST_PLACES = 3
_MOST_NAMES = 8
_SIMILAR = 0.65


def advice(table: KeyTable, section: str, name: str) -> str:
    """A sentence that says what to write in place of the unknown `section.name`."""
    known = _known_paths(table)
    if name in known and "." in name:
        return f"write it nested, as {_nested(name)}"
    if name in known:
        return f"did you mean {name} at the top level?"
    same_name = sorted(path for path in known if path.rsplit(".", 1)[-1] == name)
    if same_name and len(same_name) <= _MOST_PLACES:
        return f"did you mean {' or '.join(same_name)}?"
    here = _names_in(known, section)
    close = difflib.get_close_matches(name, here, n=1, cutoff=_SIMILAR)
    if close:
        return f"did you mean {_join(section, close[0])}?"
    far = {path.rsplit(".", 1)[-1]: path for path in sorted(known, reverse=True)}
    close = difflib.get_close_matches(name, far, n=1, cutoff=_SIMILAR)
    if close:
        return f"did you mean {far[close[0]]}?"
    if section and 0 < len(here) <= _MOST_NAMES:
        return f"{section} knows {', '.join(sorted(here))}; remove the key or write one of these"
    begin = sorted(inner for inner in here if name and inner.startswith(f"{name}_"))
    if 0 < len(begin) <= _MOST_PLACES:
        return f"did you mean {' or '.join(_join(section, inner) for inner in begin)}?"
    names = {inner: _join(section, inner) for inner in here} if here else far
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f"the nearest known key is {names[nearest]}; remove the key or see docs/config.md for every key"


def _known_paths(table: KeyTable) -> set[str]:
    known: set[str] = set()
    for key in table.keys.values():
        if key.status is not Status.DEPRECATED and ANY_NAME not in key.path.split("."):
            known.update((key.path, *key.aliases))
    for section, components in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        for model in components.values():
            known.update(f"{section}.params.{parameter}" for parameter in model.model_fields)
    return known


def _names_in(known: set[str], section: str) -> set[str]:
    prefix = f"{section}." if section else ""
    return {path[len(prefix) :].split(".", 1)[0] for path in known if path.startswith(prefix)}


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _nested(path: str) -> str:
    *sections, name = path.split(".")
    return "".join(f'"{part}": {{' for part in sections) + f'"{name}": ...' + "}" * len(sections)

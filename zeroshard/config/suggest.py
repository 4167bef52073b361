"""What an unknown key was probably meant to be.

First the same name at another level (the commonest mistake: a key put beside its section), then a similar name in the
same section, then a similar name anywhere.
"""

from __future__ import annotations

import difflib

from zeroshard.config.keys import ANY_NAME, KeyTable, Status

_MOST_PLACES = 3
_SIMILAR = 0.65


def advice(table: KeyTable, section: str, name: str) -> str:
    """A sentence that says what to write in place of the unknown `section.name`."""
    known = _known_paths(table)
    if name in known:
        return f"write it nested, as {_nested(name)}"
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
    if here and section:
        return f"{section} knows {', '.join(sorted(here))}; remove the key or write one of these"
    nearest = difflib.get_close_matches(name, [*here, *far], n=1, cutoff=0.0)
    full = [path for path in known if nearest and path.rsplit(".", 1)[-1] == nearest[0]]
    closest = f"the nearest known key is {sorted(full)[0] if full else nearest[0]}; " if nearest else ""
    return f"{closest}remove the key or see docs/config.md for every key"


def _known_paths(table: KeyTable) -> set[str]:
    known: set[str] = set()
    for key in table.keys.values():
        if key.status is not Status.DEPRECATED and ANY_NAME not in key.path.split("."):
            known.update((key.path, *key.aliases))
    return known


def _names_in(known: set[str], section: str) -> set[str]:
    prefix = f"{section}." if section else ""
    return {path[len(prefix) :].split(".", 1)[0] for path in known if path.startswith(prefix)}


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _nested(path: str) -> str:
    *sections, name = path.split(".")
    return "".join(f'"{part}": {{' for part in sections) + f'"{name}": ...' + "}" * len(sections)

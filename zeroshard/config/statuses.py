"""What may be given for keys that are not obeyed, and how `"auto"` is resolved.

A key that isn't built yet passes at its inert value and is refused by name at any other. Nothing here reads a value for
use; obeyed keys are validated by the models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zeroshard.config.entries import Entries, Entry
from zeroshard.config.keys import Key, Status, kind_in_words, kind_matches
from zeroshard.config.problems import Problems, show

_DATA_PARALLEL_SIZE = "data_parallel_size"
_PRECISIONS = ("bf16.enabled", "fp16.enabled")
_MAX_LR = "scheduler.params.warmup_max_lr"
_DEFAULT_PARAMS = ("betas", "eps", "weight_decay", "warmup_min_lr", "warmup_type", "momentum")


def check_statuses(entries: Entries, world_size: int, problems: Problems) -> None:
    """Report every entry that asks for what isn't built or will not be, and wrong kinds of values that nobody reads."""
    for entry in entries.values():
        status = entry.key.status
        if status is Status.OBEYED or entry.is_auto:
            continue
        if not kind_matches(entry.key.kind, entry.value):
            what = f"must be {kind_in_words(entry.key.kind)}, not {show(entry.value)}"
            problems.add(entry.path, entry.origin, what)
        elif status in (Status.INERT_ONLY, Status.REMOVED) and not _is_inert(entry, world_size):
            problems.add(entry.path, entry.origin, _refusal(entry))


def _is_inert(entry: Entry, world_size: int) -> bool:
    if isinstance(entry.value, dict):
        return entry.value.get("enabled") is False or (not entry.value and entry.key.kind == "dict")
    if entry.path == _DATA_PARALLEL_SIZE:
        return entry.value == world_size
    return any(_same(entry.value, inert) for inert in entry.key.inert)


def _same(value: Any, inert: Any) -> bool:
    if isinstance(value, str) and isinstance(inert, str):
        return value.lower() == inert.lower()
    return isinstance(value, bool) == isinstance(inert, bool) and value == inert


def _refusal(entry: Entry) -> str:
    shown = "" if isinstance(entry.value, dict) else f"{show(entry.value)} asks for "
    feature, _, hint = entry.key.note.partition("; ")
    advice = f" ({hint})" if hint else ""
    if entry.key.status is Status.INERT_ONLY:
        return f"{shown}{feature}, which is not built yet; {_way_out(entry.key)}{advice}"
    return f"{shown}{feature}, which will not be built (it was removed upstream too); {_way_out(entry.key)}{advice}"


def _way_out(key: Key) -> str:
    if key.inert:
        return f"remove the key or set it to {' or '.join(show(value) for value in key.inert)}"
    return "remove the key"


def resolve_autos(entries: Entries, problems: Problems) -> Entries:
    """Entries without `"auto"`: what falls to a default or is derived is left out; `auto_rules` keeps its rule."""
    resolved: Entries = {}
    for path, entry in entries.items():
        if not entry.is_auto:
            resolved[path] = entry
        elif path in _PRECISIONS:
            _resolve_precision(entry, entries, resolved, problems)
        elif path == _MAX_LR:
            resolved[path] = replace(entry, value=None, origin=f"auto: the optimizer's rate ({entry.origin})")
        elif not _has_default(entry):
            what = f'is "auto" and nothing gives it a value; write a value, or pass overrides={{{show(path)}: ...}}'
            problems.add(path, entry.origin, what)
    return resolved


def auto_rules(entries: Entries) -> dict[str, str]:
    """The origin of each value that `"auto"` left to a default or to the batch triple."""
    rules: dict[str, str] = {}
    for path, entry in entries.items():
        if entry.is_auto and _has_default(entry):
            rule = "derived from the others" if entry.key.auto == "derived" else "default"
            rules[path] = f"auto: {rule} ({entry.origin})"
    return rules


def _has_default(entry: Entry) -> bool:
    return entry.key.auto in ("default", "derived") or ("params." in entry.path and entry.name in _DEFAULT_PARAMS)


def _resolve_precision(entry: Entry, entries: Entries, resolved: Entries, problems: Problems) -> None:
    other = next(path for path in _PRECISIONS if path != entry.path)
    if other in entries and entries[other].value is True:
        resolved[entry.path] = replace(entry, value=False, origin=f"auto: {other} is true ({entry.origin})")
        return
    what = (
        'is "auto" and nothing says which precision to train in; write true or false, '
        f"or pass overrides={{{show(entry.path)}: ...}}"
    )
    problems.add(entry.path, entry.origin, what)

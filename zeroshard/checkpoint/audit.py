"""A log of who saved, loaded, exported and deleted the checkpoints of a directory. Changes of its lines are detected.

    DIR/audit.jsonl   {"n": 3, "time", "who", "act": "save", "tag", "digest", "before": HASH, "hash": HASH}
    DIR/audit.head    {"n": 3, "hash": HASH}       of the last line, so that lines missing at the end are detected
                      a kill may leave one more line, or a part of one; the next action removes it

Each line has the SHA-256 of the line before it, so that a reader detects lines that were changed, removed, inserted or
moved. It also has the digest of the checkpoint's table, so that a load detects a checkpoint that is not the one saved
last under its tag. The config's `checkpoint.audit` starts a log; from then on all actions are logged, also those of
commands. A user who may write to the directory can start a new log: keep the hash of a line elsewhere, and give it to
`zeroshard audit verify --head`. Rejected: a log per checkpoint, which would be deleted with it.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.jsonfile import canonical, no_duplicate_keys
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.temporary_files import final_name, new_id, sync_folder, temporary_path, write_synced
from zeroshard.errors import CheckpointError

LOG = "audit.jsonl"
HEAD = "audit.head"
_FIRST = "0" * 64
_FIELDS = frozenset({"n", "time", "who", "act", "tag", "digest", "before", "hash"})


class Act(str, Enum):
    """What was done with a checkpoint."""

    SAVE = "save"
    LOAD = "load"
    EXPORT = "export"
    IMPORT = "import"
    DELETE = "delete"
    REKEY = "rekey"
    SIGN = "sign"
    HOLD = "hold"
    RELEASE = "release"


_WRITES = frozenset({Act.SAVE, Act.IMPORT, Act.REKEY})


@dataclass(frozen=True)
class Entry:
    """A line of the log; `digest` is the SHA-256 of the checkpoint's table, "" after its deletion."""

    n: int
    time: str
    who: str
    act: str
    tag: str
    digest: str
    before: str
    hash: str


@dataclass(frozen=True)
class Log:
    """The lines of a log, up to the first one that was changed.

    Attributes:
        problem: what was changed, in a sentence; None if nothing was.
        nbytes: bytes of the lines.
    """

    entries: tuple[Entry, ...]
    problem: str | None
    nbytes: int = 0

    def written(self, tag: str) -> Entry | None:
        """The last line of a tag that has the digest of its checkpoint."""
        mine = (entry for entry in reversed(self.entries) if entry.tag == tag and entry.act in _WRITES)
        return next(mine, None)


def has_log(base: Path) -> bool:
    """Whether the actions in a directory are logged; also where the log was removed and its head was left."""
    return os.path.lexists(base / LOG) or os.path.lexists(base / HEAD)


def begin_log(base: Path) -> None:
    """Log the actions in a directory from now on. Raises CheckpointError if the log can't be made."""
    if not has_log(base):
        try:
            base.mkdir(parents=True, exist_ok=True)
            os.close(os.open(base / LOG, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))
        except OSError as error:
            raise CheckpointError(f"{base / LOG} can't be begun: {error.strerror}") from error


def record(base: Path, act: Act, tag: str, digest: str | None = None) -> None:
    """Add a line to the log, if there is one.

    Args:
        digest: digest of the checkpoint's table; None computes it.

    Raises:
        CheckpointError: the log can't be written, or was changed; no line is added.
    """
    if not has_log(base):
        return
    where = base / LOG
    try:
        if not os.path.lexists(where):
            raise CheckpointError(f"{_removed(base)}; nothing is added to it")
        with _locked(where) as descriptor:
            found = read_log(base)
            if found.problem is not None:
                raise CheckpointError(f"{found.problem}; nothing is added to it")
            os.ftruncate(descriptor, found.nbytes)
            last = found.entries[-1] if found.entries else None
            content = {
                "n": 1 if last is None else last.n + 1,
                "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                "who": user_here(),
                "act": act.value,
                "tag": tag,
                "digest": digest_of(base / tag) if digest is None else digest,
                "before": _FIRST if last is None else last.hash,
            }
            entry = {**content, "hash": _hash(content)}
            os.write(descriptor, canonical(entry).encode() + b"\n")
            os.fsync(descriptor)
            _replace_head(base, {"n": entry["n"], "hash": entry["hash"]})
    except OSError as error:
        raise CheckpointError(f"{where} can't be written: {error.strerror}") from error


def read_log(base: Path) -> Log:
    """All lines of a directory's log, checked. Raises CheckpointError if it can't be read."""
    where = base / LOG
    try:
        lines = where.read_bytes().split(b"\n")
    except OSError as error:
        if not os.path.lexists(where) and os.path.lexists(base / HEAD):
            return Log((), _removed(base))
        raise CheckpointError(f"{where} can't be read: {error.strerror}") from error
    entries: list[Entry] = []
    lines.pop()  # after the last newline: nothing, or a part of a line
    for number, line in enumerate(lines, 1):
        entry = _entry(line)
        before = entries[-1].hash if entries else _FIRST
        if entry is None or entry.n != number or entry.before != before:
            return Log(tuple(entries), f"{where}: line {number} is not what was written there, or lines are missing")
        entries.append(entry)
    ends: list[dict[str, Any] | None] = [None, *({"n": entry.n, "hash": entry.hash} for entry in entries)]
    if _head(base) not in ends[-2:]:
        return Log(tuple(entries), f"{where} does not end as {base / HEAD} says: lines are missing at its end")
    return Log(tuple(entries), None, sum(len(line) + 1 for line in lines))


def check_load(base: Path, folder: Path) -> None:
    """Raises CheckpointError if there is a log, and a checkpoint is not the one that was saved last under its tag."""
    if not has_log(base):
        return
    found = read_log(base)
    if found.problem is not None:
        raise CheckpointError(f"{found.problem}; nothing is loaded from here until somebody has looked into it")
    entry = found.written(
        final_name(folder, "old") or folder.name
    )  # a save that replaces the checkpoint has renamed it
    if entry is None:
        raise CheckpointError(f"{folder} is not in {base / LOG}: nobody saved it here since the log was begun")
    if entry.digest != digest_of(folder):
        raise CheckpointError(
            f"{folder / MANIFEST} is not the one that {entry.who} wrote at {entry.time} ({base / LOG}, line "
            f"{entry.n}): it was changed, or an older one was put back"
        )


def digest_of(folder: Path) -> str:
    """SHA-256 of a checkpoint's table, which has the checksums of all other files. Raises OSError."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def _removed(base: Path) -> str:
    return f"{base / LOG} is not there, though {base / HEAD} is: the log was removed"


@contextmanager
def _locked(where: Path) -> Iterator[int]:
    descriptor = os.open(where, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _entry(line: bytes) -> Entry | None:
    """The entry of a line; None if any byte of it was changed."""
    try:
        value = json.loads(line, object_pairs_hook=no_duplicate_keys)
        if not isinstance(value, dict) or value.keys() != _FIELDS or canonical(value).encode() != line:
            return None
        content = {name: kept for name, kept in value.items() if name != "hash"}
        return Entry(**value) if value["hash"] == _hash(content) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def _head(base: Path) -> dict[str, Any] | None:
    try:
        value = json.loads((base / HEAD).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{base / HEAD} can't be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _replace_head(base: Path, head: Mapping[str, Any]) -> None:
    staged = temporary_path(base, HEAD, new_id(), "partial")
    write_synced(staged, canonical(head).encode())
    staged.replace(base / HEAD)
    sync_folder(base)


def user_here() -> str:
    """USER@HOST of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"

"""Checkpoints that must be kept, whatever is pruned or saved: a hold, laid on by a person and taken off by one.

    DIR/TAG/hold.json    {"why": ..., "who": ..., "time": ...}

`prune`, `keep` and a save under the same tag leave such a checkpoint alone. It says nothing of who removes folders by
hand. Rejected: permissions of the file system, which the job that saves has itself.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

from zeroshard.checkpoint.audit import Act, record, user_here
from zeroshard.checkpoint.directory import HOLD
from zeroshard.checkpoint.temporary_files import sync_folder, write_synced
from zeroshard.errors import CheckpointError


def lay_hold(folder: Path, why: str) -> None:
    """Keep a checkpoint. Raises CheckpointError where that can't be written down, or was before."""
    text = {"why": why, "who": user_here(), "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    try:
        write_synced(folder / HOLD, json.dumps(text).encode())
        sync_folder(folder)
    except FileExistsError as error:
        raise CheckpointError(f"{folder} is held already ({folder / HOLD})") from error
    except OSError as error:
        raise CheckpointError(f"{folder / HOLD} can't be written: {error.strerror}") from error
    record(folder.parent, Act.HOLD, folder.name)


def release_hold(folder: Path) -> None:
    """Let a checkpoint be removed again. Raises CheckpointError where it is not held."""
    record(folder.parent, Act.RELEASE, folder.name)
    try:
        (folder / HOLD).unlink()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not held (there is no {folder / HOLD})") from error
    except OSError as error:
        raise CheckpointError(f"{folder / HOLD} can't be removed: {error.strerror}") from error

"""Holds, by which users protect checkpoints from being pruned or replaced until they release them.

    DIR/TAG/hold.json    {"why": ..., "who": ..., "time": ...}

`prune`, `keep` and a save under the same tag leave such a checkpoint as it is. A user can still remove the folder.
Rejected: permissions of the file system, since the job that saves has them.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

from zeroshard.checkpoint.audit import Act, record, user_here
from zeroshard.checkpoint.directory import HOLD
from zeroshard.checkpoint.temporary_files import sync_folder, write_synced
from zeroshard.errors import CheckpointError


def place_hold(folder: Path, why: str) -> None:
    """Hold a checkpoint. Raises CheckpointError if it is held already, or the hold can't be written."""
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
    """Release a checkpoint. Raises CheckpointError if it is not held."""
    record(folder.parent, Act.RELEASE, folder.name)
    try:
        (folder / HOLD).unlink()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not held (there is no {folder / HOLD})") from error
    except OSError as error:
        raise CheckpointError(f"{folder / HOLD} can't be removed: {error.strerror}") from error

"""Refuses to stand in for a deepspeed that is installed itself."""

from __future__ import annotations

from importlib.metadata import distributions

MARK = "+zeroshard"


def check_alone() -> None:
    """Raises ImportError where metadata of the real deepspeed is found beside ours."""
    for found in distributions(name="deepspeed"):
        version = found.metadata["Version"] or "unknown"
        if MARK not in version:
            raise ImportError(
                f"deepspeed {version} is installed beside zeroshard-deepspeed, which provides the same module: one has "
                "overwritten files of the other. Remove both (pip uninstall zeroshard-deepspeed deepspeed), then "
                "install the one that you want",
                name="deepspeed",
            )

"""Communicators, collectives, and the watchdog that finds hangs. The public function is `init_distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.comm.join import init_distributed

__all__ = ["init_distributed"]


def __getattr__(name: str) -> Any:
    """Imported at the first use, as `zeroshard` itself does: torch takes seconds."""
    if name != "init_distributed":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zeroshard.comm.join import init_distributed

    return init_distributed

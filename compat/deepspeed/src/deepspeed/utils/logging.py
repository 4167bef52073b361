"""The logger."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from deepspeed._exports import lazy

logger = logging.getLogger("zeroshard")

__getattr__, __dir__ = lazy(__name__, {})


def set_log_level_from_string(level: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the logger, or of another, by its name in any case.

    Raises:
        ValueError: there is no such level.
    """
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise ValueError(f"set_log_level_from_string: {level!r} is none of debug, info, warning, error and critical")
    (custom_logger or logger).setLevel(number)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks; None or -1 means all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)

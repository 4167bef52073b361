"""The monitor without an engine, for scripts that write events of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from deepspeed._exports import lazy
from zeroshard.config.resolved import ObserveConfig
from zeroshard.observe.build import check_packages, make_monitor

__getattr__, __dir__ = lazy(__name__, {})


class MonitorMaster:
    """Writes events on rank 0 to every monitor of a config.

    Args:
        monitor_config: `DeepSpeedConfig(...).monitor_config`.

    Raises:
        DeepSpeedConfigError: a package that one of them needs is not installed.
    """

    def __init__(self, monitor_config: ObserveConfig) -> None:
        check_packages(monitor_config)
        first = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        self._monitor = make_monitor(monitor_config, first=first)
        self.enabled = self._monitor.enabled

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write (name, value, step) triples."""
        self._monitor.write_events(event_list)

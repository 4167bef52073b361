"""deepspeed.monitor: events of a run, written where the config says."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {"monitor": "deepspeed.monitor.monitor"})

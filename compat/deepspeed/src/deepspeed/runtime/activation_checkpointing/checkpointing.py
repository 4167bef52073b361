"""deepspeed.checkpointing: zeroshard's activation checkpointing of calls, which has DeepSpeed's arguments.

DeepSpeed's variables of this module (`CPU_CHECKPOINT` and others) are this thread's settings, to be read and set. Those
of a model-parallel group, which divides activations, have the values of a run without one.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

from deepspeed._exports import lazy
from zeroshard import checkpointing as _calls
from zeroshard.errors import UsageError

_imported, __dir__ = lazy(
    __name__,
    {
        **{name: f"zeroshard.checkpointing:{name}" for name in ("checkpoint", "configure", "is_configured", "reset")},
        "non_reentrant_checkpoint": "zeroshard.checkpointing:checkpoint",
    },
)
_ENABLED = "deepspeed_checkpointing_enabled"
_SWITCHES = {"CPU_CHECKPOINT": "on_host", "SYNCHRONIZE": "synchronize", "PROFILE_TIME": "profile"}
_FIXED = {"PARTITION_ACTIVATIONS": False, "CONTIGUOUS_CHECKPOINTING": False, "num_layers": None, "mpu": None}


def __getattr__(name: str) -> Any:
    if name == _ENABLED:
        return _calls.is_configured()
    if name in _SWITCHES:
        return getattr(_calls.current(), _SWITCHES[name])
    return _FIXED[name] if name in _FIXED else _imported(name)


class _Settable(ModuleType):
    """This module: a setting that is assigned to is set, in place of a variable that nobody would read."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises UsageError for a value that has no meaning here."""
        if name == _ENABLED and value != _calls.is_configured():
            _calls.configure() if value else _calls.reset()
        elif name in _SWITCHES and value != getattr(_calls.current(), _SWITCHES[name]):
            _calls.apply(replace(_calls.current(), **{_SWITCHES[name]: bool(value)}))
        elif name in _FIXED and value != _FIXED[name]:
            raise UsageError(
                f"deepspeed.checkpointing.{name} = {value!r}: activations are not divided; it stays as it is"
            )
        elif name not in (_ENABLED, *_SWITCHES, *_FIXED):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Settable

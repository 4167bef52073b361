"""Defaults of the config that scripts compare with, from zeroshard's table of keys."""

from __future__ import annotations

from deepspeed._exports import lazy
from zeroshard.config.keys import key_table

GRADIENT_CLIPPING_DEFAULT = key_table().keys["gradient_clipping"].default
LOG_LEVEL_DEFAULT = key_table().keys["log_level"].default

__getattr__, __dir__ = lazy(__name__, {})

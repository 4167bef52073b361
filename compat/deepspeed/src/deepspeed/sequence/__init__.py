"""Attention over divided sequences."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {"layer": "deepspeed.sequence.layer"})

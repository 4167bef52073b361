"""Lamb by DeepSpeed's name."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {"FusedLamb": "zeroshard:Lamb"})

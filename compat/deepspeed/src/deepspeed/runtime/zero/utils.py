"""The error that DeepSpeed's ZeRO raises: here, every error that zeroshard raises on purpose is one."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {"ZeRORuntimeException": "zeroshard.errors:ZeroShardError"})

"""Counts the forwards of a model between two calls."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from deepspeed._exports import lazy
from zeroshard.errors import UsageError
from zeroshard.observe.flops.counter import Counter
from zeroshard.observe.flops.profile import ModelProfile
from zeroshard.observe.flops.table import in_words

__getattr__, __dir__ = lazy(__name__, {"get_model_profile": "zeroshard:get_model_profile"})


class FlopsProfiler:
    """FLOPs of the forwards between `start_profile` and `stop_profile`; backwards count as part of them.

    Args:
        ds_engine: not needed; the config's `flops_profiler` counts the steps of an engine.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.started = False
        self._running: ExitStack | None = None
        self._counter = Counter()
        self._begin = 0.0
        self._found: ModelProfile | None = None

    def start_profile(self, ignore_list: list[type[nn.Module]] | None = None) -> None:
        """Count from here on."""
        self._ignored = tuple(ignore_list or ())
        self._counter, self._running, self.started = Counter(), ExitStack(), True
        self._begin = time.perf_counter()
        self._running.enter_context(self._counter.of_forward())

    def stop_profile(self) -> None:
        """Count no more."""
        if self._running is not None:
            self._running.close()
            self._running = None
            seconds = time.perf_counter() - self._begin
            self._found = ModelProfile(self.model, self._counter, seconds, self._ignored)

    def end_profile(self) -> None:
        """Forget what was counted."""
        self.stop_profile()
        self._found, self.started = None, False

    @property
    def _profile(self) -> ModelProfile:
        if self._found is None:
            raise UsageError("FlopsProfiler: call start_profile(), the model, and stop_profile() before")
        return self._found

    def get_total_flops(self, as_string: bool = False) -> Any:
        """FLOPs that were counted."""
        return in_words(self._profile.flops, "FLOPs") if as_string else self._profile.flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiplications with their additions that were counted."""
        return in_words(self._profile.macs, "MACs") if as_string else self._profile.macs

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the model."""
        return in_words(self._profile.params) if as_string else self._profile.params

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds between the two calls."""
        return f"{self._profile.seconds * 1000:.2f} ms" if as_string else self._profile.seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print what was counted, or write it to a file."""
        text = self._profile.text(depth=module_depth, top=top_modules, detailed=detailed)
        if output_file is None:
            print(text, flush=True)
        else:
            Path(output_file).write_text(text + "\n", encoding="utf-8")

"""`checkpoint(function, *args)`: keep a call's inputs only and run it again in the backward, as the config says.

    forward     inputs of call 0 | inputs of call 1 | ...     on the device, or copied to the host beside compute
    backward    ... | call 1 once more, its backward | call 0 once more, its backward

For scripts that choose the places themselves, in DeepSpeed's manner; `checkpoint_activations` chooses a model's blocks.
`zeroshard.initialize` takes the settings from the config's section `activation_checkpointing`, `configure` from its
arguments. They hold in the thread that set them, since `checkpoint` has no handle by which it could be told. Rejected:
settings of an engine, which a call inside of a model's forward does not know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from zeroshard.arguments import need_function, need_kind
from zeroshard.config import ActivationConfig, activation_section
from zeroshard.config.document import Source
from zeroshard.errors import UsageError
from zeroshard.sharding.activations import run_checkpointed

_LOGGER = logging.getLogger("zeroshard")


@dataclass(frozen=True)
class CallSettings:
    """How calls of `checkpoint` are made.

    Attributes:
        on_host: what a call keeps rests in host memory until the backward.
        synchronize: wait for the device before and after each run of a function.
        profile: log the seconds of each run, forward and once more; waits for the device as `synchronize` does.
    """

    on_host: bool = False
    synchronize: bool = False
    profile: bool = False


_PLAIN = CallSettings()
_SETTINGS: ContextVar[CallSettings | None] = ContextVar("zeroshard_checkpointing", default=None)


def configure(
    mpu_: object = None,
    deepspeed_config: Source | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how this thread's calls of `checkpoint` are made; arguments as DeepSpeed's, which precede the config's keys.

    Partitioned activations divide inputs that the ranks of a model-parallel group share. Without such a group there are
    none, and `partition_activations`, `contiguous_checkpointing` and `num_checkpoints`, which sizes the latter's
    buffer, change nothing, as in DeepSpeed.

    Raises:
        UsageError: a model-parallel group (`mpu_`), which is not built yet; a switch that is neither true nor false; a
            contiguous buffer without a size.
        ConfigError: a wrong value in the config's section.
    """
    if mpu_ is not None:
        raise UsageError("checkpointing.configure(mpu_=...): tensor and pipeline parallelism are not built yet")
    unused = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
    }
    settings = _PLAIN if deepspeed_config is None else settings_of(activation_section(deepspeed_config))
    given = {"on_host": checkpoint_in_cpu, "synchronize": synchronize, "profile": profile}
    names = ("checkpoint_in_cpu", "synchronize", "profile")
    for name, value in (*zip(names, given.values(), strict=True), *unused.items()):
        need_kind(value, (bool, type(None)), f"checkpointing.configure({name}=...)", "True, False or None")
    need_kind(num_checkpoints, (int, type(None)), "checkpointing.configure(num_checkpoints=...)", "a number or None")
    if contiguous_checkpointing and num_checkpoints is None and not _counted(deepspeed_config):
        raise UsageError(
            "checkpointing.configure(contiguous_checkpointing=True) needs num_checkpoints, the number of layers whose "
            "inputs the buffer holds (number_checkpoints in the config)"
        )
    _SETTINGS.set(replace(settings, **{name: value for name, value in given.items() if value is not None}))


def _counted(config: Source | None) -> bool:
    return config is not None and activation_section(config).number is not None


def settings_of(config: ActivationConfig) -> CallSettings:
    """The config's settings of calls."""
    return CallSettings(config.on_host, config.synchronize, config.profile)


def apply(settings: CallSettings) -> None:
    """Set how this thread's calls of `checkpoint` are made."""
    _SETTINGS.set(settings)


def current() -> CallSettings:
    """How this thread's calls of `checkpoint` are made."""
    return _SETTINGS.get() or _PLAIN


def is_configured() -> bool:
    """Whether `configure` or `initialize` has been called in this thread. `checkpoint` works without, too."""
    return _SETTINGS.get() is not None


def reset() -> None:
    """Forget the settings."""
    _SETTINGS.set(None)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function` gives; in the backward it runs again, with the same random numbers.

    Kept until then are tensors among the arguments, on the device or, with `cpu_checkpointing`, in host memory.
    Gradients are, bit for bit, those of a plain call.
    """
    need_function(function, "checkpoint", "a function")
    settings = current()
    run = _Observed(function, settings) if settings.synchronize or settings.profile else function
    return run_checkpointed(run, settings.on_host, {"use_reentrant": False}, *args, **kwargs)


class _Observed:
    """A function whose runs are timed, or begin and end with an idle device."""

    def __init__(self, function: Callable[..., Any], settings: CallSettings) -> None:
        self._function, self._settings, self._runs = function, settings, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        phase = "once more, in the backward" if self._runs else "in the forward"
        self._runs += 1
        _wait_for_device()
        began = time.perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            _wait_for_device()
            if self._settings.profile:
                name = getattr(self._function, "__qualname__", type(self._function).__name__)
                seconds = time.perf_counter() - began
                _LOGGER.info("checkpoint: %s ran %s in %.3f ms", name, phase, 1e3 * seconds)


def _wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()

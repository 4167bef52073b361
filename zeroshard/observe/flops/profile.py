"""The FLOPs of a model that is called once: `get_model_profile`, with DeepSpeed's arguments."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.errors import UsageError
from zeroshard.observe.flops.counter import Counter
from zeroshard.observe.flops.table import in_words, module_lines
from zeroshard.sharding.unowned import whole_shape


class ModelProfile:
    """What one forward of a model takes.

    Attributes:
        flops, macs: of products and attention; a multiplication with its addition is one MAC and two FLOPs.
        params: parameters of the model.
        seconds: of the call that was counted, which counting makes slower.
    """

    def __init__(self, model: nn.Module, counter: Counter, seconds: float, ignored: Iterable[type[nn.Module]]) -> None:
        left_out = _flops_of(model, counter.by_module, tuple(ignored))
        self.flops = counter.forward - left_out
        self.macs = self.flops // 2
        self.params = sum(math.prod(whole_shape(parameter)) for parameter in model.parameters())
        self.seconds = seconds
        self.by_module = dict(counter.by_module)

    def text(self, *, depth: int, top: int, detailed: bool) -> str:
        """The profile as lines."""
        totals = [
            f"forward {in_words(self.flops, 'FLOPs')}, {in_words(self.macs, 'MACs')}",
            f"parameters {in_words(self.params)}",
            f"latency {self.seconds * 1000:.2f} ms, with counting",
        ]
        return "\n".join([*totals, *module_lines(self.by_module, depth=depth, top=top, detailed=detailed)])


def profile_forward(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    warm_up: int = 1,
    ignored: Iterable[type[nn.Module]] = (),
    mode: str = "forward",
) -> ModelProfile:
    """Call the model, after `warm_up` calls that are not counted, without gradients.

    Args:
        mode: "forward", or "generate" for a model's `generate`.
    """
    if mode not in ("forward", "generate"):
        raise UsageError(f'mode must be "forward" or "generate", got {mode!r}')
    call: Any = model if mode == "forward" else getattr(model, "generate", None)
    if call is None:
        raise UsageError(f'mode="generate": {type(model).__name__} has no generate')
    counter = Counter()
    with torch.no_grad():
        for _ in range(warm_up):
            call(*args, **dict(kwargs or {}))
        begin = time.perf_counter()
        with counter.of_forward():
            call(*args, **dict(kwargs or {}))
    return ModelProfile(model, counter, time.perf_counter() - begin, ignored)


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """FLOPs, MACs and parameters of a model, from one forward on `args` and `kwargs`, or on ones of `input_shape`.

    Returns:
        Three numbers, as text with a unit where `as_string`.
    """
    if input_shape is not None:
        if args or kwargs:
            raise UsageError("get_model_profile: give input_shape, or args and kwargs, not both")
        like = next(model.parameters(), torch.empty(()))
        args = (torch.ones(tuple(input_shape), dtype=like.dtype, device=like.device),)
    elif not args and not kwargs:
        raise UsageError("get_model_profile: give input_shape, args or kwargs for the forward")
    found = profile_forward(model, args, kwargs, warm_up=warm_up, ignored=ignore_modules or (), mode=mode)
    text = found.text(depth=module_depth, top=top_modules, detailed=detailed)
    if output_file is not None:
        Path(output_file).write_text(text + "\n", encoding="utf-8")
    elif print_profile:
        print(text, flush=True)
    if not as_string:
        return found.flops, found.macs, found.params
    return in_words(found.flops, "FLOPs"), in_words(found.macs, "MACs"), in_words(found.params)


def _flops_of(model: nn.Module, by_module: Mapping[str, int], kinds: tuple[type[nn.Module], ...]) -> int:
    """FLOPs of the outermost modules of these classes."""
    root = type(model).__name__
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") or outer == "" for outer in found)
        if isinstance(module, kinds) and not inside:
            found.append(path)
    return sum(by_module.get(f"{root}.{path}" if path else root, 0) for path in found)

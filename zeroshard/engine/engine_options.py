"""The options of a config that concern the engine itself, beside its plan and its optimizer.

Rejected: the config as an argument of the engine, which would then have to know what each section means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zeroshard.engine.loader import LoaderOptions
from zeroshard.engine.observing import Observer
from zeroshard.engine.saving.save_options import SaveOptions
from zeroshard.engine.settings import Settings


@dataclass(frozen=True)
class EngineOptions:
    """The config's options for the engine itself.

    Attributes:
        accumulate_dtype: of accumulators that are taken in mid-run; None means float32.
        autocast: dtype in which the forward runs under torch.autocast; None leaves autocast alone.
        loader: how loaders are made.
        saving: how checkpoints are saved.
        steps_per_print: optimizer steps between two lines of progress that rank 0 prints; None is none.
        clip_value: limit for the magnitude of each gradient element; 0 is no limit.
        ignore_unused: whether parameters may stay without a gradient in a step; else that is an error.
        check_every_pass: check every pass and step for writes that version counters do not show, not only the first.
        observer: observes the steps; None for no observer.
        counts_micro_batches: whether the engine counts which micro-batch is the last; else each step() is an update.
        settings: answers to questions about the config.
    """

    accumulate_dtype: str | None = None
    autocast: torch.dtype | None = None
    loader: LoaderOptions = field(default_factory=LoaderOptions)
    saving: SaveOptions = field(default_factory=SaveOptions)
    steps_per_print: int | None = None
    clip_value: float = 0.0
    ignore_unused: bool = True
    check_every_pass: bool = False
    observer: Observer | None = None
    counts_micro_batches: bool = True
    settings: Settings = field(default_factory=Settings)

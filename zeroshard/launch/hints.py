"""What a rank's last error means where its own text does not say: memory that is full, by whom, and what helps there.

    where in the program     from the traceback: while a model is built, in a step, in a save
    fragmentation            torch's message says how much is reserved and not used
    others on the card       and how much processes in all have in use

Rejected: to catch the error in the ranks, where memory is so short that a further line may fail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_FRAGMENTED = 0.05
"""Share of what torch holds that has to be unused before fragmentation is the cause."""
_PLACES = (
    (("save_checkpoint", "save_16bit_model", "saving/", "checkpoint/saver"), "while a checkpoint was saved"),
    (("from_pretrained", "zeroshard.initialize", "in initialize", "in shard"), "while the model was built"),
    (("in backward", "in step", "in forward", "_call_impl"), "in a step"),
)
_CURES = {
    "while a checkpoint was saved": "saving gathers one tensor at a time; a save in the background "
    '("checkpoint": {"async": true}) also copies the state into host memory',
    "while the model was built": "build it within zeroshard.Init() or on the meta device, so that no rank holds all of "
    "it; zeroshard plan says what has to fit",
    "in a step": "zeroshard plan MODEL --cluster ... says which stage, offload and checkpointing fit: fewer samples in "
    "a micro-batch, activation_checkpointing, offload_optimizer. memory_breakdown shows what is held",
}


@dataclass(frozen=True)
class _Device:
    """What torch says of a GPU when its memory is full, in bytes."""

    asked: float
    total: float
    used: float
    allocated: float
    unused: float


def hint(summary: str, stack: str) -> str | None:
    """What an error means and what helps, for errors of memory; None for others.

    Args:
        summary: kind and text of the error.
        stack: the traceback, or "".
    """
    if "CUDA out of memory" in summary:
        return _of_device(summary, stack)
    if "can't allocate memory" in summary or summary.startswith("MemoryError"):
        return f"the memory of the host is full {_place(stack)}: {_CURES[_place(stack)]}"
    return None


def _of_device(summary: str, stack: str) -> str:
    place = _place(stack)
    told = _numbers(summary)
    if told is None:
        return f"the memory of the GPU is full {place}: {_CURES[place]}"
    others = told.total - told.used - _size(summary, r"of which {} is free")
    held = f"of {_gib(told.total)} torch has allocated {_gib(told.allocated)} and holds {_gib(told.unused)} unused"
    if told.unused >= told.asked and told.unused > _FRAGMENTED * (told.allocated + told.unused):
        return (
            f"the memory of the GPU is fragmented {place}: {held}, more than the {_gib(told.asked)} that were asked "
            "for, in pieces that are too small. Set PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
    if told.used and others > 0.2 * told.total:
        return (
            f"other processes use {_gib(others)} of the GPU's {_gib(told.total)}: {held}. Look at nvidia-smi for a run "
            "that was left, or for two ranks on one GPU"
        )
    return f"the memory of the GPU is full {place}: {held}, and {_gib(told.asked)} more were asked for. {_CURES[place]}"


def _numbers(summary: str) -> _Device | None:
    total = _size(summary, r"total capacity of {}")
    if not total:
        return None
    return _Device(
        asked=_size(summary, r"Tried to allocate {}"),
        total=total,
        used=_size(summary, r"this process has {} memory in use"),
        allocated=_size(summary, r"{} is allocated by PyTorch"),
        unused=_size(summary, r"{} is reserved by PyTorch but unallocated"),
    )


def _size(text: str, pattern: str) -> float:
    found = re.search(pattern.replace("{}", _SIZE), text)
    return float(found[1]) * _UNITS[found[2]] if found else 0.0


def _place(stack: str) -> str:
    for words, place in _PLACES:
        if any(word in stack for word in words):
            return place
    return "in a step"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"

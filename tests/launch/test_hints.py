"""Memory that is full is explained by who holds it, where the program was, and what helps there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.test_failures import _failing
from zeroshard.launch.hints import hint

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 79.15 GiB "
    "of which {free} is free. Including non-PyTorch memory, this process has {used} memory in use. Of the allocated "
    "memory {allocated} is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
MOSTLY = {
    "asked": "2.00 GiB",
    "free": "512.00 MiB",
    "used": "78.60 GiB",
    "allocated": "77.00 GiB",
    "unused": "300.00 MiB",
}


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (
            'File "train.py", line 9, in <module>\n    engine, *_ = zeroshard.initialize(model=model)',
            "zeroshard.Init()",
        ),
        ('File "engine.py", line 3, in backward', "zeroshard plan MODEL"),
        ('File "engine.py", line 9, in save_checkpoint\nFile "x.py", line 1, in step', "saving gathers one tensor"),
    ],
    ids=["init", "step", "save"],
)
def test_a_full_gpu_is_told_with_its_figures_and_the_place(stack: str, words: str) -> None:
    said = hint(FULL.format(**MOSTLY), stack)
    assert said is not None
    assert (
        "of 79.15 GiB torch has allocated 77.00 GiB and holds 0.29 GiB unused, and 2.00 GiB more were asked for" in said
    )
    assert words in said


def test_fragmentation_is_told_from_memory_that_is_full() -> None:
    said = hint(FULL.format(**{**MOSTLY, "allocated": "60.00 GiB", "unused": "17.00 GiB"}), "")
    assert said is not None
    assert said.startswith("the memory of the GPU is fragmented in a step: of 79.15 GiB torch has allocated 60.00 GiB")
    assert "expandable_segments:True" in said


def test_memory_that_others_use_is_told() -> None:
    said = hint(FULL.format(**{**MOSTLY, "used": "30.00 GiB", "allocated": "29.00 GiB"}), "")
    assert said is not None
    assert said.startswith("other processes use 48.65 GiB of the GPU's 79.15 GiB")


def test_a_full_host_is_told_and_other_errors_are_left_alone() -> None:
    text = "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"
    assert "the memory of the host is full while the model was built" in (hint(text, "in initialize") or "")
    assert "the memory of the host is full" in (hint("MemoryError", "") or "")
    assert "the memory of the GPU is full in a step" in (hint("torch.OutOfMemoryError: CUDA out of memory.", "") or "")
    assert hint("ValueError: planted", "") is None


def test_the_launcher_says_it_below_the_traceback(tmp_path: Path) -> None:
    status, said = _failing(tmp_path, "import torch\ntorch.empty(2**60)\n", "--nproc", "1")
    assert status == 1
    assert any(line.startswith("zeroshard: the memory of the host is full") for line in said)

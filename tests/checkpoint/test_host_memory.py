"""A save and a load take host memory for about two of the largest tensors, however large the state is."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.saving.checkpoints import saver_of
from zeroshard.plan.memory import checkpoint_copy_nbytes

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks of memory")
WIDTH, LAYERS = 2048, 2
LARGEST = 4 * WIDTH * 2 * WIDTH
RANKS = 1  # each rank takes as much for itself
SLACK = 8 << 20


def _status(key: str) -> int:
    found = re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class Peak:
    """How far resident memory rose above what it was at the start, and by how much it is more at the end."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.extra = _status("VmHWM") - self._before
        self.kept = _status("VmRSS") - self._before


def _start(width: int) -> Any:
    sizes = [width, 2 * width] * (LAYERS // 2) + [width]
    model = nn.Sequential(*(nn.Linear(one, two, bias=False) for one, two in pairwise(sizes)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine = zeroshard.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, width)).square().mean())
    engine.step()
    return engine


def _measure(rank: int, world: int, directory: str) -> dict[str, int]:
    # What a first save imports and allocates once for all is not the state's.
    warm = _start(8)
    warm.save_checkpoint(f"{directory}/warm", background=True)
    warm.load_checkpoint(f"{directory}/warm")
    warm.destroy()

    engine = _start(WIDTH)
    state = 3 * LARGEST * LAYERS // world
    with Peak() as save:
        engine.save_checkpoint(directory, "one")
    with Peak() as load:
        engine.load_checkpoint(directory, "one")
    with Peak() as first:
        engine.save_checkpoint(directory, "two", background=True)
        engine.wait_for_checkpoint()
    staging, planned = saver_of(handle_of(engine.module)).staging_nbytes, checkpoint_copy_nbytes(engine.plan)
    engine.destroy()
    assert planned >= state
    assert planned <= staging <= planned + 4096, "one copy of what this rank saves, and step counts"
    return {"save": save.extra, "load": load.extra, "background": first.extra - staging}


def test_saves_and_loads_need_memory_for_two_of_the_largest_tensors_and_the_copy_in_the_background(
    tmp_path: Path,
) -> None:
    for extra in run_ranks(RANKS, _measure, str(tmp_path)):
        assert all(count <= 2 * LARGEST + SLACK for count in extra.values()), extra

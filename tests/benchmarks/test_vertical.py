"""The benchmark of the vertical schedule runs both orders, on a disk that is as slow as it is told to be."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

import torch

from benchmarks.vertical import SlowDisk, measured
from tests.support.disk import disk_folder
from tests.support.distributed import run_ranks
from zeroshard.nvme.places import Spill
from zeroshard.tiers import finish


def _both_orders(rank: int, world: int, folder: Path) -> tuple[int, int, int, int]:
    options = Namespace(path=str(folder), gib=0.1, tokens=2, rounds=1, gbps=2.0)
    row = measured(options, 3, lambda _: None)
    assert row.ratio > 0
    return row.usual_read, row.vertical_read, row.usual_device, row.vertical_device


def test_both_orders_are_measured_in_one_run(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        ((usual, vertical, device, less),) = run_ranks(1, _both_orders, folder)
    assert usual >= 2 * vertical
    assert less < device


def test_a_slow_disk_takes_its_time(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        memory = SlowDisk(Spill((str(folder),)), 1 << 22, 4e6)
        row, values = memory.allocate(1 << 18, torch.float32), torch.rand(1 << 18)
        began = time.monotonic()
        finish(row.write(0, values))
        assert time.monotonic() - began >= 0.25 - 0.01
        found = torch.empty_like(values)
        finish(row.read(0, found))
        assert torch.equal(found, values)
        assert time.monotonic() - began >= 0.5 - 0.02
        memory.close()

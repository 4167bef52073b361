"""see_memory_usage and memory_status tell what the process holds."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import zeroshard
from zeroshard.engine.outside_step.memory_use import memory_use


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system has no /proc")
def test_what_was_taken_is_seen() -> None:
    before = memory_use()
    taken = torch.ones(16 * 2**20)
    after = memory_use()
    assert 48 * 2**20 < after.resident - before.resident < 96 * 2**20
    assert 0 < after.host_used < after.host_total
    del taken


def test_nothing_is_said_without_force_or_on_another_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zeroshard"):
        assert zeroshard.see_memory_usage("quiet") is None
        assert zeroshard.memory_status("quiet", print_rank=3) is None
        assert caplog.messages == []
        assert zeroshard.see_memory_usage("after building", force=True) is not None
        assert zeroshard.memory_status("after the step", reset_max=True) is not None
    assert caplog.messages[0].startswith("after building: process ")
    assert caplog.messages[1].startswith("rank 0, after the step: process ")
    assert "GiB" in caplog.messages[1]

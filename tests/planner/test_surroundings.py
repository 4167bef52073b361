"""The doctor names settings of the machine that slow a run or hide its errors, and nothing where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from zeroshard.launch.cli import app
from zeroshard.planner.machine.surroundings import (
    clock_is_set,
    limit_notes,
    notes,
    processor_notes,
    shared_memory_notes,
    swap_notes,
    versions,
)

GIB = 2**30


def test_variables_that_slow_a_run_are_named_with_what_they_do() -> None:
    set_here = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "trace", "HOME": "1"}
    said = [note for note in notes(set_here) if "=" in note.split(":")[0]]
    assert [note.split(":")[0] for note in said] == ["CUDA_LAUNCH_BLOCKING=1", "NCCL_IB_DISABLE=1", "NCCL_DEBUG=trace"]
    assert "the host waits for every kernel" in said[0]
    harmless = {"CUDA_LAUNCH_BLOCKING": "0", "NCCL_DEBUG": "INFO", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert not [note for note in notes(harmless) if "=" in note.split(":")[0]]


def test_limits_of_memory_files_and_processors_are_named() -> None:
    assert list(limit_notes(-1, -1)) == []
    assert list(limit_notes(8 * GIB, 65536)) == []
    locked, files = limit_notes(64 << 10, 1024)
    assert "limited to 64 KiB (ulimit -l)" in locked
    assert "limited to 1024 (ulimit -n)" in files
    assert list(processor_notes("max 100000", 8)) == []
    assert list(processor_notes("800000 100000", 8)) == []
    (quota,) = processor_notes("150000 100000", 8)
    assert "allows 1.5 processors, though 8 are seen" in quota


def test_shared_memory_and_swap_are_named() -> None:
    assert list(shared_memory_notes(8 * GIB)) == []
    assert "/dev/shm has 64 MiB" in next(shared_memory_notes(64 << 20))
    assert list(swap_notes("SwapTotal: 8388608 kB\nSwapFree: 8388608 kB\n")) == []
    assert list(swap_notes("")) == []
    assert "3.0 GiB are swapped out" in next(swap_notes("SwapTotal: 8388608 kB\nSwapFree: 5242880 kB\n"))


def test_the_doctor_prints_versions_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    shown = CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path), "--disk-mib", "16"], catch_exceptions=False)
    assert f"versions           {versions()}" in shown.output
    assert "note               NCCL_P2P_DISABLE=1: GPUs of a node send through host memory" in shown.output
    assert isinstance(clock_is_set(), bool)

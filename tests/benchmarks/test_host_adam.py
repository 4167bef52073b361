"""The benchmark of steps on the host runs, and counts bytes, shares and ratios from the times that it took."""

from __future__ import annotations

import pytest

from benchmarks.host_adam import JOBS, Contender, Memory, kernel_rows, measure, summary, torch_rows
from zeroshard.optim.host.choose import available_kernel


def test_every_contender_takes_a_turn_in_every_round() -> None:
    contenders = kernel_rows("zeroshard", available_kernel(), Memory(4096)) + torch_rows(Memory(4096))
    times = measure(contenders, 2)
    assert [len(row) for row in times] == [2] * 2 * len(JOBS)


def test_ratios_are_medians_over_rounds_and_shares_count_bytes() -> None:
    def nothing() -> None: ...

    contenders = [
        Contender("stream", "in place", 16, nothing),
        Contender("zeroshard", "fp32", 28, nothing),
        Contender("torch fused", "fp32", 28, nothing),
    ]
    rows = summary(contenders, [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [3.0, 4.0, 4.0]], numel=10**9)
    assert rows[1]["of_stream"] == pytest.approx(0.5 * 28 / 16)
    assert rows[1]["times_torch"] == pytest.approx(1.5)
    assert rows[1]["gb_s"] == pytest.approx(14.0)

"""What compute waits for is timed in one step of some, by part of the step and by what is waited for."""

from __future__ import annotations

import time

import pytest
import torch

from zeroshard.observe.device_waits import DeviceWaits, merged
from zeroshard.observe.host import BETWEEN, LINK
from zeroshard.plan.legs import Stream

CPU = torch.device("cpu")
LEAST = 2e-3


def _wait(waits: DeviceWaits, stream: Stream) -> None:
    if waits.active:
        with waits.waiting(stream):
            time.sleep(LEAST)


def test_waits_are_told_by_part_and_by_stream() -> None:
    waits = DeviceWaits(CPU, every=1)
    with waits.part("forward"):
        _wait(waits, Stream.GATHER)
        _wait(waits, Stream.GATHER)
        _wait(waits, Stream.UPLOAD)
    with waits.part("backward"):
        _wait(waits, Stream.REDUCE)
    _wait(waits, Stream.DOWNLOAD)
    step = waits.take()
    assert step is not None
    assert step.passed
    seconds = step.seconds()
    assert {part: set(kinds) for part, kinds in seconds.items()} == {
        "forward": {"all-gather", LINK},
        "backward": {"reduce-scatter"},
        BETWEEN: {LINK},
    }
    assert seconds["forward"]["all-gather"] >= 2 * LEAST
    again = waits.take()
    assert again is not None
    assert again.waits == ()


def test_every_stream_but_compute_has_a_name() -> None:
    waits = DeviceWaits(CPU, every=1)
    for stream in Stream:
        if stream is not Stream.COMPUTE:
            _wait(waits, stream)
    assert waits.take() is not None


@pytest.mark.parametrize("every", [1, 2, 8])
def test_one_step_of_some_is_timed_and_the_others_have_none(every: int) -> None:
    waits = DeviceWaits(CPU, every=every)
    timed: list[bool] = []
    for _ in range(4 * every):
        _wait(waits, Stream.GATHER)
        timed.append(waits.take() is not None)
    assert [index for index, one in enumerate(timed) if one] == list(range(every - 1, 4 * every, every))


def test_waits_of_host_and_device_are_added_up_by_part() -> None:
    host, device = {"forward": {"gc": 1.0, LINK: 2.0}}, {"forward": {LINK: 3.0}, "step": {"all-gather": 4.0}}
    assert merged(host, device) == {"forward": {"gc": 1.0, LINK: 5.0}, "step": {"all-gather": 4.0}}

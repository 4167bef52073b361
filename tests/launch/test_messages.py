"""What a process of the launcher says reaches a stream that others write to, too."""

from __future__ import annotations

import io
import os
import sys

import pytest

from zeroshard.launch.messages import say


@pytest.mark.skipif(sys.platform != "linux", reason="pipes that keep writes apart are of Linux")
def test_a_line_is_one_write_to_an_unbuffered_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe2(os.O_DIRECT)  # each write is a packet, which a read gives by itself
    with io.TextIOWrapper(os.fdopen(write, "wb", buffering=0), write_through=True) as stream:  # as python -u has it
        monkeypatch.setattr(sys, "stderr", stream)
        say("one rank ended")
    assert os.read(read, 100) == b"one rank ended\n"
    os.close(read)

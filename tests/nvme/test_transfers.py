"""Bytes move between memory and files alike whoever moves them: io_uring, native threads, or threads of Python's."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.support.disk import disk_folder
from zeroshard.nvme.choose import all_transfers, best_transfers
from zeroshard.nvme.spill import SpillFile
from zeroshard.nvme.transfers import BLOCK, DiskStalled, FileEnded, Transfer, Transfers

MIB = 1 << 20


def _memory(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _each() -> list[Transfers]:
    return list(all_transfers())


def test_what_was_written_is_read_by_every_reader(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        file = SpillFile(str(folder), 0, 12 * MIB)
        source, target = _memory(3 * MIB + BLOCK), _memory(3 * MIB + BLOCK)
        for writer in _each():
            source.random_(0, 256)
            for offset in (0, 5 * MIB + BLOCK):
                writer.start(
                    write=True,
                    file=file.descriptor,
                    offset=offset,
                    address=source.data_ptr(),
                    nbytes=source.numel(),
                ).wait(60)
                for reader in _each():
                    target.zero_()
                    reader.start(
                        write=False,
                        file=file.descriptor,
                        offset=offset,
                        address=target.data_ptr(),
                        nbytes=target.numel(),
                    ).wait(60)
                    assert torch.equal(source, target), (writer.name, reader.name, offset)
                    reader.close()
            writer.close()


def test_many_transfers_in_both_directions_are_under_way_at_once(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        file = SpillFile(str(folder), 0, 16 * MIB)
        for transfers in _each():
            memory = _memory(16 * MIB)
            memory.random_(0, 256)
            expected = memory.clone()

            def start(index: int, *, write: bool, memory: torch.Tensor = memory, by: Transfers = transfers) -> Transfer:
                at = index * MIB
                return by.start(
                    write=write, file=file.descriptor, offset=at, address=memory.data_ptr() + at, nbytes=MIB
                )

            written = [start(index, write=True) for index in range(16)]
            for one in written[:8]:
                one.wait(60)
            memory[: 8 * MIB].zero_()
            both = [start(index, write=False) for index in range(8)] + written[8:]
            for one in both:
                one.wait(60)
            assert torch.equal(memory, expected), transfers.name
            transfers.close()


def test_an_error_comes_out_of_the_wait_with_its_number(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        path = folder / "read-only"
        path.write_bytes(bytes(BLOCK))
        descriptor = os.open(path, os.O_RDONLY)
        memory = _memory(2 * BLOCK)
        for transfers in _each():
            begun = transfers.start(write=True, file=descriptor, offset=0, address=memory.data_ptr(), nbytes=BLOCK)
            with pytest.raises(OSError, match="descriptor") as found:
                begun.wait(60)
            assert found.value.errno == errno.EBADF, transfers.name
            begun = transfers.start(write=False, file=descriptor, offset=0, address=memory.data_ptr(), nbytes=2 * BLOCK)
            with pytest.raises(FileEnded):
                begun.wait(60)
            transfers.close()
        os.close(descriptor)


def test_a_disk_that_does_not_answer_is_named_after_the_time_limit() -> None:
    out, into = os.pipe()
    memory = _memory(BLOCK)
    transfers = best_transfers()
    if "io_uring" not in transfers.name:
        pytest.skip("only io_uring reads from a pipe, the one file that never answers")
    begun = transfers.start(write=False, file=out, offset=-1, address=memory.data_ptr(), nbytes=BLOCK)
    with pytest.raises(DiskStalled, match=r"no answer in 0\.2 seconds"):
        begun.wait(0.2)
    os.close(into)  # which ends the read
    transfers.close()
    os.close(out)


def test_closing_ends_the_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    tasks = len(os.listdir("/proc/self/task"))
    for transfers in _each():
        transfers.close()
    end = time.monotonic() + 5
    while len(os.listdir("/proc/self/task")) > tasks and time.monotonic() < end:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= tasks
    assert threading.active_count() <= before

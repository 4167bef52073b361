"""Rows on disk give back what was written to any of their elements, in any size, and nobody sees the files."""

from __future__ import annotations

import gc
import os
import signal
import stat
import weakref
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.support.disk import disk_folder, memory_in, spill_descriptors
from tests.support.distributed import start_process
from zeroshard.nvme.transfers import BLOCK, in_blocks
from zeroshard.nvme.volume import CHUNK
from zeroshard.tiers import RowPart, clear, finish, loaded, store

ELEMENTS = BLOCK // 4


def _sizes() -> list[int]:
    """From one element to three blocks and seven elements, every size near the border of a block and some between."""
    near = [block * ELEMENTS + more for block in range(4) for more in range(-7, 8)]
    return sorted({size for size in [*near, *range(1, 3 * ELEMENTS, 97)] if 0 < size <= 3 * ELEMENTS + 7})


@pytest.mark.parametrize("encrypt", [False, True])
def test_every_size_from_one_element_to_three_blocks_comes_back(tmp_path: Path, encrypt: bool) -> None:
    if encrypt:
        pytest.importorskip("cryptography")
    with disk_folder(tmp_path) as folder:
        memory = memory_in(folder, nbytes=1 << 20, encrypt=encrypt)
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            for numel in _sizes():
                row = memory.allocate(numel, dtype)
                assert loaded(row, slice(None)).count_nonzero() == 0
                values = torch.randint(-99, 99, (numel,)).to(dtype)
                finish(row.write(0, values))
                assert torch.equal(loaded(row, slice(None)), values), (numel, dtype)


@pytest.mark.parametrize("encrypt", [False, True])
def test_parts_are_written_over_without_harm_to_what_is_beside(tmp_path: Path, encrypt: bool) -> None:
    if encrypt:
        pytest.importorskip("cryptography")
    generator = torch.Generator().manual_seed(5)
    with disk_folder(tmp_path) as folder:
        memory = memory_in(folder, nbytes=0, encrypt=encrypt)
        numel = 5 * ELEMENTS + 11
        row, expected = memory.allocate(numel, torch.float32), torch.zeros(numel)
        for _ in range(60):
            low, high = sorted(torch.randint(0, numel + 1, (2,), generator=generator).tolist())
            values = torch.rand(high - low, generator=generator)
            store(row, slice(low, high), values)
            expected[low:high] = values
            low, high = sorted(torch.randint(0, numel + 1, (2,), generator=generator).tolist())
            assert torch.equal(RowPart(row, low, high).values(), expected[low:high])
        clear(row)
        assert loaded(row, slice(None)).count_nonzero() == 0


def test_aligned_memory_is_read_and_written_where_it_lies_and_may_be_under_way(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        memory = memory_in(folder, nbytes=1 << 24)
        rows = [memory.allocate(300 * ELEMENTS + 3, torch.float32) for _ in range(3)]
        sources = [torch.rand(row.numel) for row in rows]
        for completion in [row.write(0, source) for row, source in zip(rows, sources, strict=True)]:
            finish(completion)
        targets = [torch.empty(row.numel) for row in rows]
        for completion in [row.read(0, target) for row, target in zip(rows, targets, strict=True)]:
            finish(completion)
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(source, target)
        assert memory.used == sum(row.numel * 4 for row in rows)
        assert memory.pinned == 0


def _aligned(numel: int) -> torch.Tensor:
    """Elements that begin at a block, so that they are moved from and to where they lie."""
    whole = torch.rand(numel + ELEMENTS)
    begin = -whole.data_ptr() % BLOCK // 4
    return whole[begin : begin + numel]


def test_memory_lives_until_its_transfer_has_ended_whoever_else_holds_it(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        memory = memory_in(folder, nbytes=1 << 24)
        for numel in (8 * ELEMENTS, 8 * ELEMENTS + 3):
            row = memory.allocate(numel, torch.float32)
            for begin in (row.write, row.read):
                values = _aligned(numel)
                known = weakref.ref(values)
                completion = begin(0, values)
                del values
                assert known() is not None, "the transfer knows its address alone"
                finish(completion)
                del completion
                assert known() is None


def test_several_folders_hold_a_share_each_and_give_the_same_bytes(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        folders = [folder / name for name in ("a", "b", "c")]
        for one in folders:
            one.mkdir()
        numel = (7 * CHUNK + 3 * BLOCK) // 4 + 5
        memory = memory_in(*folders, nbytes=in_blocks(numel * 4))
        row, values = memory.allocate(numel, torch.float32), torch.rand(numel)
        finish(row.write(0, values))
        assert torch.equal(loaded(row, slice(None)), values)
        assert torch.equal(loaded(row, slice(CHUNK // 4 - 3, 3 * CHUNK)), values[CHUNK // 4 - 3 : 3 * CHUNK])
        for one in folders:
            (descriptor,) = spill_descriptors(one)
            assert os.fstat(descriptor).st_size == 3 * CHUNK
            assert os.pread(descriptor, 0, 0) == b""
        memory.close()


def test_files_have_no_name_no_reader_and_all_their_space(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        memory = memory_in(folder, nbytes=1 << 22)
        (descriptor,) = spill_descriptors(folder)
        found = os.fstat(descriptor)
        assert list(folder.iterdir()) == []
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_nlink == 0
        assert found.st_size == 1 << 22
        assert found.st_blocks * 512 >= 1 << 22
        with pytest.raises(OSError, match=r".+"):
            os.link(f"/proc/self/fd/{descriptor}", folder / "named", follow_symlinks=True)
        memory.close()
        memory.close()
        assert spill_descriptors(folder) == []


def test_space_is_given_back_when_the_last_row_is_gone(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        row = memory_in(folder).allocate(100, torch.float32)
        assert len(spill_descriptors(folder)) == 1
        assert row.numel == 100
        del row
        gc.collect()
        assert spill_descriptors(folder) == []


def test_with_encryption_the_disk_never_holds_the_plain_bytes(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with disk_folder(tmp_path) as folder:
        marker = torch.arange(4 * ELEMENTS, dtype=torch.float32) + 0.5
        for encrypt in (False, True):
            memory = memory_in(folder, nbytes=1 << 20, encrypt=encrypt)
            row = memory.allocate(marker.numel() + 9, torch.float32)
            (descriptor,) = spill_descriptors(folder)
            before = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            finish(row.write(3, marker))
            first = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            finish(row.write(3, marker))
            again = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            plain = marker.numpy().tobytes()[:64]
            assert (plain in first) is not encrypt
            assert (first == again) is not encrypt, "the same values twice give other bytes"
            assert before != first
            assert torch.equal(loaded(row, slice(3, 3 + marker.numel())), marker)
            memory.close()


def _train_until_killed(folder: Path, ready: Connection) -> None:
    memory = memory_in(folder, nbytes=1 << 24)
    row, values = memory.allocate(1 << 22, torch.float32), torch.rand(1 << 22)
    finish(row.write(0, values))
    ready.send(True)
    while True:
        finish(row.write(0, values))


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        process, connection = start_process(_train_until_killed, folder)
        assert connection.recv()
        assert list(folder.iterdir()) == []
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert list(folder.iterdir()) == []

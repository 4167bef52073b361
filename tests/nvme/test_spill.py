"""What can be wrong with a folder is found when the file is opened, and the error names rank and folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.disk import disk_folder, spill_descriptors
from zeroshard.errors import PlanError
from zeroshard.nvme.places import Spill
from zeroshard.nvme.spill import SpillFile


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=f"rank 3: {tmp_path}/none does not exist; name a folder"):
        SpillFile(str(tmp_path / "none"), 3, 1 << 20)
    with pytest.raises(PlanError, match=f"rank 3: {tmp_path}/file is not a folder"):
        SpillFile(str(tmp_path / "file"), 3, 1 << 20)


def test_a_folder_in_memory_is_refused() -> None:
    shared = Path("/dev/shm")
    if not (shared.is_dir() and os.access(shared, os.W_OK)):
        pytest.skip("no /dev/shm here")
    with pytest.raises(PlanError, match=r'rank 0: /dev/shm is in memory \(tmpfs\).*offload to "cpu"'):
        SpillFile(str(shared), 0, 1 << 20)


def test_a_folder_that_can_not_be_written_to_is_refused(tmp_path: Path) -> None:
    def forbidden(path: str, flags: int, mode: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with disk_folder(tmp_path) as folder, pytest.raises(PlanError, match=r"can't be written to \(Permission denied\)"):
        SpillFile(str(folder), 0, 1 << 20, open_file=forbidden)


def test_too_little_space_says_what_is_needed_and_what_is_free(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        found = os.statvfs(folder)
        too_much = found.f_bavail * found.f_frsize + (1 << 34)
        with pytest.raises(PlanError, match=r"rank 1: .* GiB are needed by each of the \d+ ranks .* GiB are free"):
            SpillFile(str(folder), 1, too_much)
        assert spill_descriptors(folder) == []


def _without_unnamed_files(path: str, flags: int, mode: int) -> int:
    """os.open of a file system that has none, as some network ones."""
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported", path)
    return os.open(path, flags, mode)


def test_a_file_with_a_name_is_taken_only_where_that_is_allowed_and_loses_it_at_once(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        with pytest.raises(PlanError, match=r"without unnamed files \(O_TMPFILE\).*allow_visible_spill"):
            SpillFile(str(folder), 0, 1 << 20, open_file=_without_unnamed_files)
        file = SpillFile(str(folder), 0, 1 << 20, allow_visible=True, open_file=_without_unnamed_files)
        assert list(folder.iterdir()) == []
        assert os.fstat(file.descriptor).st_mode & 0o777 == 0o600
        file.close()


def test_a_file_system_without_direct_input_and_output_is_refused(tmp_path: Path) -> None:
    def pipe(path: str, flags: int, mode: int) -> int:
        out, into = os.pipe()
        os.close(out)
        return into

    with (
        disk_folder(tmp_path) as folder,
        pytest.raises(PlanError, match=r"(no space can be reserved|direct)"),
    ):
        SpillFile(str(folder), 0, 1 << 20, open_file=pipe)


def test_what_the_user_says_is_checked() -> None:
    for paths, problem in (((), "one folder"), (("",), "one folder"), (("/a", "/a"), "twice"), ("/a", "a tuple")):
        with pytest.raises(PlanError, match=problem):
            Spill(paths)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="encrypt 1 must be True or False"):
        Spill(("/a",), 1)  # pyright: ignore[reportArgumentType]

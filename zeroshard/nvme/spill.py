"""Files for state that nobody sees and nothing outlives: one per rank and folder, open in this process alone.

    O_TMPFILE     no name, from the first moment on: a process that is killed leaves nothing
    O_EXCL        and none can be given to it later
    mode 0600     whoever reaches it through /proc has to be this user
    O_DIRECT      past the page cache: memory is what the plan counts, and the disk's own speed is what is measured
    fallocate     the space is there before training starts, not missing in its middle

Everything that can be wrong with a folder is found here, before training. Rejected: named files that are removed at the
end, which a crash leaves behind with the weights in them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path

from zeroshard.errors import PlanError
from zeroshard.nvme.transfers import BLOCK

_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""What file systems without O_TMPFILE answer."""
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_MODE = 0o600
OpenFile = Callable[[str, int, int], int]


class SpillFile:
    """An open file of `nbytes`, all reserved.

    Args:
        folder: where; see the module for what it has to be.
        rank: of this process, for messages.
        allow_visible: take a name for a moment where the file system has no unnamed files.
        open_file: os.open, or what a test puts in its place.

    Raises:
        PlanError: the folder can't be used, and why.
    """

    def __init__(
        self, folder: str, rank: int, nbytes: int, *, allow_visible: bool = False, open_file: OpenFile = os.open
    ) -> None:
        self.folder, self.rank, self.nbytes = folder, rank, 0
        self._check_folder()
        self.descriptor = self._open(allow_visible, open_file)
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        try:
            self._pass_the_cache()
            self.reserve(nbytes)
            self._try_out()
        except PlanError:
            self.close()
            raise

    def __str__(self) -> str:
        return f"the file of rank {self.rank} in {self.folder}"

    def reserve(self, nbytes: int) -> None:
        """Have so many bytes in all. Raises PlanError where the disk has not."""
        if nbytes <= self.nbytes:
            return
        try:
            os.posix_fallocate(self.descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._refusal(f"no space can be reserved there ({error.strerror})") from error
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            raise self._refusal(
                f"{nbytes / 2**30:.3f} GiB are needed by each of the {ranks} ranks of this machine, and "
                f"{self._free() / 2**30:.3f} GiB are free",
                "make room, name a larger disk or several, or lower offload_optimizer.ratio (Offload.ratio)",
            ) from error
        self.nbytes = nbytes

    def close(self) -> None:
        """Give the space back. May be called twice."""
        self._finalizer()

    def _check_folder(self) -> None:
        if not Path(self.folder).is_dir():
            what = "is not a folder" if Path(self.folder).exists() else "does not exist"
            raise self._refusal(what, "name a folder on a local disk")
        kind = _file_system(os.stat(self.folder).st_dev)
        if kind in _IN_MEMORY:
            raise self._refusal(f"is in memory ({kind})", 'name a folder on a disk, or offload to "cpu"')

    def _open(self, allow_visible: bool, open_file: OpenFile) -> int:
        unnamed = getattr(os, "O_TMPFILE", None)
        if unnamed is None or not hasattr(os, "O_DIRECT"):
            raise self._refusal("this system has no unnamed files and direct I/O", 'use Linux, or offload to "cpu"')
        try:
            return open_file(self.folder, unnamed | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, _MODE)
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise self._refusal(f"can't be written to ({error.strerror})") from error
            if not allow_visible:
                raise self._refusal(
                    "is on a file system without unnamed files (O_TMPFILE)",
                    "name a folder on ext4, xfs or btrfs, or set allow_visible_spill to take a file that has a name "
                    "for a moment",
                ) from error
        name = str(Path(self.folder, f".zeroshard-{secrets.token_hex(8)}"))
        try:
            found = open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
            os.unlink(name)
        except OSError as error:
            raise self._refusal(f"can't be written to ({error.strerror})") from error
        return found

    def _pass_the_cache(self) -> None:
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError as error:
            raise self._no_direct(error) from error

    def _try_out(self) -> None:
        """A block there and back: some file systems take the flag and refuse the first write."""
        if not self.nbytes:
            return
        with mmap.mmap(-1, BLOCK) as block:
            try:
                if os.pwritev(self.descriptor, [block], 0) != BLOCK or os.preadv(self.descriptor, [block], 0) != BLOCK:
                    raise self._refusal(f"does not take blocks of {BLOCK} bytes", "name a folder on another disk")
            except OSError as error:
                raise self._no_direct(error) from error

    def _no_direct(self, error: OSError) -> PlanError:
        return self._refusal(
            f"is on a file system without direct I/O ({error.strerror})", "name a folder on ext4, xfs or btrfs"
        )

    def _free(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def _refusal(self, what: str, cure: str = "name another folder, or mend this one") -> PlanError:
        return PlanError(f"state on disk: rank {self.rank}: {self.folder} {what}; {cure}")


def _file_system(device: int) -> str:
    """The kind of file system with this device number; '' where the system does not tell."""
    table = Path("/proc/self/mountinfo")
    if not table.exists():
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in table.read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return ""

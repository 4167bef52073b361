"""Makes and checks headers of safetensors files with the sharding information of torch.distributed.checkpoint.

    | bytes of the header: 8 | header: JSON, name -> dtype, shape, bytes; padded | tensor | tensor | ...

    __metadata__ -> DCP_SHARDING_INFO: {name: {"saved_offsets": [where in the global tensor the part begins]}}

The header needs names and shapes only, so it is written before any tensor is read.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence

from zeroshard.checkpoint.dtypes import name_of
from zeroshard.checkpoint.manifest import TensorInfo
from zeroshard.checkpoint.slices import Rectangle

_ALIGNMENT = 8
_PART_NBYTES = 4 << 20


def header(entries: Sequence[tuple[TensorInfo, Rectangle]]) -> bytes:
    """Length and header of a file that has these parts of tensors, one after the other."""
    offsets = {info.name: {"saved_offsets": list(cut.offsets)} for info, cut in entries}
    table: dict[str, object] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    }
    at = 0
    for info, cut in entries:
        size = (cut.stop - cut.start) * info.dtype.itemsize
        table[info.name] = {
            "dtype": name_of(info.dtype, info.name),
            "shape": list(cut.sizes),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def read_header(read: Callable[[memoryview, int], int], nbytes: int) -> int | None:
    """CRC-32 of a file's header with the length before it; None if the length exceeds the file of `nbytes` bytes.

    Args:
        read: fills a view with the file's bytes from a position on, and returns their number.
    """
    buffer = memoryview(bytearray(_PART_NBYTES))
    start = buffer[: read(buffer[:8], 0)].tobytes()
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else nbytes
    if length > nbytes - 8:
        return None
    checksum, at = zlib.crc32(start), 8
    while at < length + 8:  # in parts, since the length may be wrong
        count = read(buffer[: min(_PART_NBYTES, length + 8 - at)], at)
        if not count:
            return None
        checksum, at = zlib.crc32(buffer[:count], checksum), at + count
    return checksum

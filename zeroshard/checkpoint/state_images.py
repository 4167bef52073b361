"""Images of ranks' state in host memory, which elastic jobs keep from step to step, and a reader of all images of a
step.

    image of a rank   bytes: [ w1 . | exp_avg of w1 . | ... ]   in memory of its node
                      table: tensors with place and CRC-32 of each block, and all state that is no tensor
    ImageReader       reads the images of one step, on any nodes, like a checkpoint

If ranks have copies of the same state, each image has its copy, and an image may be on two nodes, the rank's own and a
neighbour. So there are several sources for a part of a tensor; those of this node are tried first. A source whose bytes
do not match the checksums is skipped with a warning. If no source has some part, the step can't be restored.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from zeroshard.checkpoint import jsonfile
from zeroshard.checkpoint.manifest import BLOCK, Manifest, Part, TensorInfo, info_in, info_out
from zeroshard.checkpoint.reader import StateReader
from zeroshard.checkpoint.staging import place_pieces
from zeroshard.checkpoint.writer import Piece
from zeroshard.errors import CheckpointError

_LOGGER = logging.getLogger("zeroshard")


class Source(Protocol):
    """The images in the memory of a node."""

    def read_into(self, image: str, at: int, out: memoryview) -> None:
        """Fill `out` with bytes from `at` on. Raises OSError if the node is lost, LookupError if the image is."""
        ...


@dataclass(frozen=True)
class StateImage:
    """An image and its table.

    Attributes:
        source: the node that has it.
        name: its name there.
        where: the node, for messages.
        rank: the rank that made it.
    """

    source: Source
    name: str
    where: str
    rank: int
    table: Mapping[str, Any]


@dataclass(frozen=True)
class _ImagePart:
    """A range of a tensor's elements that is in an image from byte `begin` on."""

    image: StateImage
    begin: int
    checksums: tuple[int, ...]


def image_nbytes(pieces: Sequence[Piece]) -> int:
    """Bytes of an image of these pieces."""
    return place_pieces(pieces)[-1]


def copy_pieces(pieces: Sequence[Piece], out: torch.Tensor) -> None:
    """Copy the pieces into an image `out` (uint8); on a device, in the order of the current stream."""
    for piece, at in zip(pieces, place_pieces(pieces), strict=False):
        if piece.nbytes:
            piece.copy_into(out[at : at + piece.nbytes].view(piece.info.dtype))


def describe(pieces: Sequence[Piece], values: torch.Tensor, rest: Mapping[str, Any]) -> str:
    """The table of an image, with checksums, as JSON.

    Args:
        values: the bytes of the image (uint8, on the CPU).
        rest: world_size, aliases, state and rank_state.
    """
    data = values.numpy().data
    tensors: list[dict[str, Any]] = []
    for piece, at in zip(pieces, place_pieces(pieces), strict=False):
        end = at + piece.nbytes
        sums = [zlib.crc32(data[low : min(low + BLOCK, end)]) for low in range(at, end, BLOCK)]
        tensors.append({**info_out(piece.info), "start": piece.start, "stop": piece.stop, "begin": at, "crc32": sums})
    return jsonfile.canonical({**rest, "tensors": tensors})


class ImageReader(StateReader):
    """Reads the images of one step on all nodes, like a `CheckpointReader`.

    Args:
        images: the images of one step, in the order in which they are tried.
        what: the step, for messages.

    Raises:
        CheckpointError: a part of the state is in none of them.
    """

    def __init__(self, images: Iterable[StateImage], what: str) -> None:
        self.folder = Path(what)
        self._images = list(images)
        if not self._images:
            raise CheckpointError(f"{what}: no image of it is left")
        self._sources: dict[tuple[str, int, int], list[_ImagePart]] = {}
        self.damaged: set[str] = set()
        infos: dict[str, TensorInfo] = {}
        for image in self._images:
            for item in image.table["tensors"]:
                info = info_in(item["name"], item)
                infos.setdefault(info.name, info)
                key = (info.name, item["start"], item["stop"])
                part = _ImagePart(image, item["begin"], tuple(item["crc32"]))
                self._sources.setdefault(key, []).append(part)
        first = self._images[0].table
        world = first["world_size"]
        ranks: list[Mapping[str, Any]] = [{} for _ in range(world)]
        for image in self._images:
            ranks[image.rank] = image.table["rank_state"]
        aliases = {name: of for image in self._images for name, of in image.table["aliases"].items()}
        parts = self._parts(infos)
        self.manifest = Manifest(world, {}, infos, parts, aliases, first["state"], tuple(ranks))

    def _parts(self, infos: Mapping[str, TensorInfo]) -> dict[str, tuple[Part, ...]]:
        """The parts of each tensor in order, without copies. Raises CheckpointError for a gap."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for name, start, stop in self._sources:
            ranges.setdefault(name, []).append((start, stop))
        found: dict[str, tuple[Part, ...]] = {}
        for name, info in infos.items():
            at, parts = 0, []
            for start, stop in sorted(ranges[name]):
                if start > at:
                    break
                if stop > at or not info.numel:
                    parts.append(Part("", 0, (), (), start, stop, ()))
                    at = stop
            if at < info.numel:
                raise CheckpointError(f"{self.folder}: elements from {at} on of {name!r} are in no image that is left")
            found[name] = tuple(parts)
        return found

    def close(self) -> None:
        """Do nothing: the sources belong to the caller."""

    def read_part(self, info: TensorInfo, part: Part, start: int, stop: int, out: memoryview) -> None:
        """Fill `out` with bytes [start, stop) of a part. Raises CheckpointError if no source has them undamaged."""
        end = (part.stop - part.start) * info.dtype.itemsize
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            base = block * BLOCK
            data = self._block(info, part, block, min(base + BLOCK, end) - base)
            low, high = max(start, base), min(stop, base + BLOCK)
            out[low - start : high - start] = data[low - base : high - base]

    def _block(self, info: TensorInfo, part: Part, block: int, nbytes: int) -> memoryview:
        data = memoryview(bytearray(nbytes))
        for source in self._sources[info.name, part.start, part.stop]:
            image = source.image
            if image.name in self.damaged:
                continue
            try:
                image.source.read_into(image.name, source.begin + block * BLOCK, data)
            except (OSError, LookupError) as error:
                self._skip(image, f"can't be read ({error})")
                continue
            if zlib.crc32(data) == source.checksums[block]:
                return data
            self._skip(image, f"is damaged: {info.name!r} does not match its checksum")
        raise CheckpointError(f"{self.folder}: no image that is left has {info.name!r} whole")

    def _skip(self, image: StateImage, why: str) -> None:
        self.damaged.add(image.name)
        _LOGGER.warning("%s: the image of rank %d on %s %s; it is not used", self.folder, image.rank, image.where, why)


def parse_table(text: bytes) -> Mapping[str, Any]:
    """The table of an image. Raises ValueError for other text."""
    return json.loads(text)

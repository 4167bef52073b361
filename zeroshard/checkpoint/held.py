"""State that is held in memory from step to step: its images, and a reader over all that nodes have of one step.

    image of a rank   bytes: [ w1 . | exp_avg of w1 . | ... ]   in memory that its node holds
                      table: tensors with place and CRC-32 of each block, and all state that is no tensor
    HeldReader        the images of one step, on any nodes, read as a checkpoint is

With several copies of the state each rank's image has its copy, and an image may be there twice: on the rank's node and
on a neighbour. So a part of a tensor has several sources, those of this node first. One whose bytes are not what its
table says is passed over for the next, with a warning; a step of which some part has no source left can't be gone on
from.
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
    """Bytes of images that a node holds."""

    def read_into(self, image: str, at: int, out: memoryview) -> None:
        """Fill `out` from byte `at` on. Raises OSError where the node is gone, LookupError where the bytes are."""
        ...


@dataclass(frozen=True)
class HeldImage:
    """An image as it is known from its table.

    Attributes:
        where: for messages.
        rank: that made it, of the ranks that there were.
    """

    source: Source
    name: str
    where: str
    rank: int
    table: Mapping[str, Any]


@dataclass(frozen=True)
class _HeldPart:
    """Elements [start, stop) of a tensor, in one image from byte `begin` on."""

    image: HeldImage
    begin: int
    checksums: tuple[int, ...]


def image_nbytes(pieces: Sequence[Piece]) -> int:
    """Bytes of an image of the pieces."""
    return place_pieces(pieces)[-1]


def copy_pieces(pieces: Sequence[Piece], out: torch.Tensor) -> None:
    """Copy the pieces as they are now; on a device, in the order of the current stream."""
    for piece, at in zip(pieces, place_pieces(pieces), strict=False):
        if piece.nbytes:
            piece.copy_into(out[at : at + piece.nbytes].view(piece.info.dtype))


def describe(pieces: Sequence[Piece], values: torch.Tensor, rest: Mapping[str, Any]) -> str:
    """The table of an image whose bytes are there, with their checksums.

    Args:
        rest: world_size, aliases, state and rank_state.
    """
    data = values.numpy().data
    tensors: list[dict[str, Any]] = []
    for piece, at in zip(pieces, place_pieces(pieces), strict=False):
        end = at + piece.nbytes
        sums = [zlib.crc32(data[low : min(low + BLOCK, end)]) for low in range(at, end, BLOCK)]
        tensors.append({**info_out(piece.info), "start": piece.start, "stop": piece.stop, "begin": at, "crc32": sums})
    return jsonfile.canonical({**rest, "tensors": tensors})


class HeldReader(StateReader):
    """All that nodes hold of one step, with the reading part of a `CheckpointReader`.

    Args:
        images: of one step; those that are to be asked first come first.

    Raises:
        CheckpointError: some part of the state is in none of them.
    """

    def __init__(self, images: Iterable[HeldImage], what: str) -> None:
        self.folder = Path(what)
        self._images = list(images)
        if not self._images:
            raise CheckpointError(f"{what}: no image of it is left")
        self._sources: dict[tuple[str, int, int], list[_HeldPart]] = {}
        self.damaged: set[str] = set()
        infos: dict[str, TensorInfo] = {}
        for image in self._images:
            for item in image.table["tensors"]:
                info = info_in(item["name"], item)
                infos.setdefault(info.name, info)
                key = (info.name, item["start"], item["stop"])
                part = _HeldPart(image, item["begin"], tuple(item["crc32"]))
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
        """The parts of each tensor in order, each once. Raises CheckpointError for a gap."""
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
        """Nothing is open here; the sources are whoever's made them."""

    def read_part(self, info: TensorInfo, part: Part, start: int, stop: int, out: memoryview) -> None:
        """Fill `out` with bytes [start, stop) of a part. Raises CheckpointError where no source has them whole."""
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
                self._pass_over(image, f"can't be read ({error})")
                continue
            if zlib.crc32(data) == source.checksums[block]:
                return data
            self._pass_over(image, f"is damaged: {info.name!r} does not match its checksum")
        raise CheckpointError(f"{self.folder}: no image that is left has {info.name!r} whole")

    def _pass_over(self, image: HeldImage, why: str) -> None:
        self.damaged.add(image.name)
        _LOGGER.warning("%s: the image of rank %d on %s %s; it is not used", self.folder, image.rank, image.where, why)


def parse_table(text: bytes) -> Mapping[str, Any]:
    """A table of an image. Raises ValueError."""
    return json.loads(text)

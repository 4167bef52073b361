"""Joins the tensor-parallel parts of a DeepSpeed checkpoint by its `universal_checkpoint_info`.

    mp_rank_MM_model_states.pt, zero_pp_rank_R_mp_rank_MM_optim_states.pt     the parts of tensor-parallel rank M
    universal_checkpoint_info       patterns of names: whole on each rank, divided by columns, a padded vocabulary, two
                                    blocks

DeepSpeed writes it for models that it divides itself (AutoTP), and Megatron for its own. Names that match no pattern
are divided by rows. A checkpoint without it is refused. Patterns come from the file, so those that could run long are
refused. Rejected: finding the dim by comparing shapes with a model, which is not there yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.foreign.contents import Contents, Parameter
from zeroshard.checkpoint.foreign.deepspeed_common import Common, Files
from zeroshard.checkpoint.foreign.deepspeed_flat import open_flat
from zeroshard.checkpoint.foreign.stored import Joined, Lazy, Piece, Tile, Tiled, numel
from zeroshard.errors import CheckpointError

INFO = "universal_checkpoint_info"
_WHOLE, _COLUMNS = "tp_replicated_parameter_patterns", "parameter_with_row_parallelism_patterns"
_VOCABULARY, _BLOCKS = "vocabulary_parameter_patterns", "parameter_with_2_sub_params_cat_dim_0"
_REFUSED = {
    "parameter_to_average_patterns": "averages over ranks",
    "parameter_with_sub_params": "several weights of unequal parts in one",
    "autotp_unsupported_parameter_patterns": "parts that DeepSpeed itself can't describe",
}
_LONGEST, _REPEATS = 300, 3
_QUIET = re.compile(r"[^(){}|]*")
"""Without groups and counts, a pattern with few repetitions takes polynomial, not exponential time."""


def open_tensor_parts(ranks: Sequence[Files]) -> Contents:
    """The contents of a checkpoint of several tensor-parallel ranks. Raises CheckpointError."""
    commons = [Common.read(files) for files in ranks]
    cuts = _Cuts.read(commons[0])
    said = commons[0].state.get("mp_world_size")
    if said != len(ranks):
        raise CheckpointError(f"{ranks[0].folder} holds the files of {len(ranks)} model-parallel ranks, of {said}")
    found = [open_flat(files, common) for files, common in zip(ranks, commons, strict=True)]
    names = list(found[0].parameters)
    where = ranks[0].folder
    if any(list(contents.parameters) != names for contents in found):
        raise CheckpointError(f"{where}: tensor-parallel ranks have parameters of different names")
    parameters = {name: _joined(name, [one.parameters[name] for one in found], cuts, where) for name in names}
    return replace(found[0], origin=f"{found[0].origin}, {len(found)} tensor-parallel parts", parameters=parameters)


@dataclass(frozen=True)
class _Cuts:
    """How parameters were divided, by patterns of names."""

    patterns: Mapping[str, tuple[re.Pattern[str], ...]]
    vocabulary: int | None

    @staticmethod
    def read(common: Common) -> _Cuts:
        info = common.state.get(INFO)
        if not isinstance(info, dict):
            raise CheckpointError(
                f"{common.path}: a tensor-parallel checkpoint without {INFO} is not imported: nothing in it says along "
                "which dim a weight was cut"
            )
        for key, what in _REFUSED.items():
            if info.get(key):
                raise CheckpointError(f"{common.path}: tensor-parallel parts with {what} ({key}) are not imported")
        size = info.get("original_vocab_size")
        kinds = (_WHOLE, _COLUMNS, _VOCABULARY, _BLOCKS)
        return _Cuts(
            {kind: tuple(_pattern(text, common.path) for text in info.get(kind) or ()) for kind in kinds},
            size if type(size) is int and size > 0 else None,
        )

    def has(self, kind: str, name: str) -> bool:
        return any(pattern.match(name) for pattern in self.patterns[kind])


def _pattern(text: Any, path: Path) -> re.Pattern[str]:
    plain = isinstance(text, str) and len(text) <= _LONGEST and _QUIET.fullmatch(text)
    if not plain or sum(text.count(sign) for sign in "*+?") > _REPEATS:
        raise CheckpointError(f"{path}: the pattern {str(text)[:80]!r} in {INFO} is refused: it could run long")
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"{path} is damaged: the pattern {text!r} in {INFO}: {error}") from error


def _joined(name: str, parts: Sequence[Parameter], cuts: _Cuts, where: Path) -> Parameter:
    first = parts[0]
    if any(part.moments.keys() != first.moments.keys() for part in parts):
        raise CheckpointError(f"{where}: {name!r} has other moments on other tensor-parallel ranks")
    try:
        moments = {key: _whole(name, [part.moments[key] for part in parts], cuts) for key in first.moments}
        return replace(first, weight=_whole(name, [part.weight for part in parts], cuts), moments=moments)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {name!r}: {error}") from error


def _whole(name: str, parts: Sequence[Lazy], cuts: _Cuts) -> Lazy:
    """The whole tensor of the parts of all ranks."""
    shape, dtype = parts[0].shape, parts[0].dtype
    if cuts.has(_WHOLE, name) or not shape:
        return parts[0]
    if cuts.has(_COLUMNS, name) and len(shape) > 1:
        widths = [part.shape[1] for part in parts]
        offsets = [sum(widths[:number]) for number in range(len(parts))]
        tiles = [Tile((0, offset, *(0 for _ in shape[2:])), part) for offset, part in zip(offsets, parts, strict=True)]
        return Tiled((shape[0], sum(widths), *shape[2:]), tuple(tiles), dtype)
    blocks = 2 if cuts.has(_BLOCKS, name) else 1
    if any(part.shape[0] % blocks or part.shape[1:] != shape[1:] for part in parts):
        raise CheckpointError(f"parts of shapes {[list(part.shape) for part in parts]} do not fit together by rows")
    sizes = [numel(part.shape) // blocks for part in parts]
    pieces = [
        Piece(part, block * size, size) for block in range(blocks) for part, size in zip(parts, sizes, strict=True)
    ]
    rows = sum(part.shape[0] for part in parts)
    if cuts.has(_VOCABULARY, name) and cuts.vocabulary is not None and cuts.vocabulary < rows:
        rows, pieces = cuts.vocabulary, _first(pieces, cuts.vocabulary * numel(shape[1:]))
    return Joined((rows, *shape[1:]), tuple(pieces), dtype)


def _first(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """The first `count` elements, since rows after the vocabulary are padding."""
    found: list[Piece] = []
    for piece in pieces:
        taken = min(piece.count, count)
        if taken:
            found.append(replace(piece, count=taken))
        count -= taken
    return found

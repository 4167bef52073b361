"""Joins the tensor-parallel parts of a DeepSpeed checkpoint by its `universal_checkpoint_info`.

    mp_rank_MM_model_states.pt, zero_pp_rank_R_mp_rank_MM_optim_states.pt     the parts of tensor-parallel rank M
    universal_checkpoint_info       patterns of names: whole on each rank, divided by columns, a padded vocabulary,
                                    several weights in one

DeepSpeed writes it for models that it divides itself (AutoTP), scripts for their own (`client_state`). Names that match
no pattern are divided by rows. Patterns come from the file, so those that could run long are refused. What is whole on
each rank is compared when it is read. Rejected: finding the dim by comparing shapes with a model, which is not there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.foreign.contents import Contents, Parameter
from zeroshard.checkpoint.foreign.deepspeed_common import Common, Files, check_one_save, check_same, must_round
from zeroshard.checkpoint.foreign.deepspeed_universal import open_rank
from zeroshard.checkpoint.foreign.stored import Copies, Joined, Lazy, Mean, Piece, StoredTensor, Tile, Tiled, numel
from zeroshard.errors import CheckpointError

INFO = "universal_checkpoint_info"
_WHOLE, _COLUMNS = "tp_replicated_parameter_patterns", "parameter_with_row_parallelism_patterns"
_VOCABULARY, _BLOCKS = "vocabulary_parameter_patterns", "parameter_with_2_sub_params_cat_dim_0"
_MEAN = "parameter_to_average_patterns"
_SEVERAL, _WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
_WORDS = "original_vocab_size"
_KINDS = (_WHOLE, _MEAN, _COLUMNS, _VOCABULARY, _BLOCKS)
_OF_USERS = {*_KINDS, _SEVERAL, _WIDTHS, _WORDS, "padded_vocab_size", "universal_checkpoint_version"} | {
    "pipeline_replicated_parameter_patterns"  # tied modules, which have names of their own
}
_REFUSED = {"autotp_unsupported_parameter_patterns": "parts that DeepSpeed itself can't describe"}
_LOOKED_AT = 1024
_LONGEST, _REPEATS = 300, 3
_QUIET = re.compile(r"[^(){}|]*")
"""Without groups and counts, a pattern with few repetitions takes polynomial, not exponential time."""
_MOST_TRIES = 10**11
"""Of all patterns on all names at the worst: one or two minutes."""

Info = Mapping[str, Any]
"""`universal_checkpoint_info`, of a checkpoint or of the user in its place."""


def open_tensor_parts(ranks: Sequence[Files], info: Info | None) -> Contents:
    """The contents of a checkpoint of several tensor-parallel ranks.

    Args:
        ranks: the files of each rank.
        info: what to use in place of the checkpoint's own `universal_checkpoint_info`; None for that.

    Raises:
        CheckpointError: files are missing or damaged, or nothing says how weights were cut.
    """
    commons = [Common.read(files) for files in ranks]
    for common in commons:
        check_ranks(common, len(ranks))
    return joined_parts(ranks, commons, info)


def check_ranks(common: Common, there: int) -> None:
    """Raise CheckpointError if a rank's file tells of another number of model-parallel ranks than are there."""
    said = common.state.get("mp_world_size", 1)
    if type(said) is not int or said != there:
        raise CheckpointError(
            f"{common.path.parent} holds the files of {there} model-parallel ranks, of {str(said)[:80]} that "
            f"{common.path.name} tells of: files are missing or left from an earlier save; copy the checkpoint again"
        )


def joined_parts(ranks: Sequence[Files], commons: Sequence[Common], info: Info | None) -> Contents:
    """The contents of all tensor-parallel ranks, of a model or of one pipeline stage; as `open_tensor_parts`."""
    if info is None:
        told = [common.state.get(INFO) for common in commons]
        used = [{key: one[key] for key in _OF_USERS & one.keys()} if isinstance(one, dict) else one for one in told]
        check_same(used, INFO, ranks[0].folder)
    cuts = _Cuts.read(commons[0], info)
    # DeepSpeed tells of shared parameters in the file of rank 0 only.
    commons = [replace(common, aliases=commons[0].aliases) for common in commons]
    found = [open_rank(files, common, len(ranks)) for files, common in zip(ranks, commons, strict=True)]
    first, where = found[0], ranks[0].folder
    check_one_save(found, where)
    names = list(first.parameters)
    if any(list(contents.parameters) != names or contents.buffers.keys() != first.buffers.keys() for contents in found):
        raise CheckpointError(f"{where}: tensor-parallel ranks have parameters or buffers of different names")
    if any([group.names for group in contents.groups] != [group.names for group in first.groups] for contents in found):
        raise CheckpointError(f"{where}: tensor-parallel ranks have optimizer groups of different parameters")
    check_same([[group.options for group in contents.groups] for contents in found], "param_groups", where)
    return replace(
        first,
        origin=f"{first.origin}, {len(found)} tensor-parallel parts",
        parameters={
            name: _converted(parameter, commons, cuts, where)
            if parameter.trainable and ranks[0].universal
            else _joined(name, [one.parameters[name] for one in found], cuts, where)
            for name, parameter in first.parameters.items()
        },
        buffers={name: cuts.buffer(name, [one.buffers[name] for one in found], where) for name in first.buffers},
        complete=all(contents.complete for contents in found),
        left_out=tuple(dict.fromkeys(line for contents in found for line in contents.left_out)),
    )


@dataclass(frozen=True)
class _Several:
    """Several weights in one parameter, each of them divided by rows.

    Attributes:
        rows: rows of each weight, or the number of weights of equal size.
        widths: rows of each weight on each rank; None for equal parts.
    """

    pattern: re.Pattern[str]
    rows: tuple[int, ...] | int
    widths: tuple[tuple[int, ...], ...] | None

    def on_ranks(self, held: Sequence[int]) -> Sequence[Sequence[int]]:
        """Rows of each weight on each rank; `held` are the rows that ranks have. Raises CheckpointError."""
        ranks, total = len(held), sum(held)
        count = min(self.rows, total) if isinstance(self.rows, int) else 0
        rows = self.rows if isinstance(self.rows, tuple) else (total // max(1, count),) * count
        widths = self.widths or [(size // ranks,) * ranks for size in rows]
        fit = all(len(one) == ranks for one in widths) and [sum(one) for one in zip(*widths, strict=True)] == list(held)
        if not fit:
            raise CheckpointError(
                f"{INFO} says {list(widths)} of its weights' rows on each rank, which have {list(held)}"
            )
        return widths


@dataclass(frozen=True)
class _Cuts:
    """How parameters were divided, by patterns of names."""

    patterns: Mapping[str, tuple[re.Pattern[str], ...]]
    several: tuple[_Several, ...]
    vocabulary: int | None

    @staticmethod
    def read(common: Common, given: Info | None) -> _Cuts:
        info = common.state.get(INFO) if given is None else given
        if not isinstance(info, dict):
            raise CheckpointError(
                f"{common.path}: nothing in this tensor-parallel checkpoint says along which dim each weight was cut, "
                f"as it has no {INFO}; pass --universal-checkpoint-info FILE, JSON with lists of patterns of names that"
                f" are whole on each rank ({_WHOLE}), cut by columns ({_COLUMNS}) and of a padded vocabulary "
                f"({_VOCABULARY}, with {_WORDS}): all others are cut by rows"
            )
        for key, what in _REFUSED.items():
            if info.get(key):
                raise CheckpointError(f"{common.path}: tensor-parallel parts with {what} ({key}) are not imported")
        unknown = [] if given is None else sorted(given.keys() - _OF_USERS)
        if unknown:
            raise CheckpointError(f"{INFO} has {unknown}; {common.path} needs keys of {sorted(_OF_USERS)}")
        size = info.get(_WORDS)
        if size is not None and (type(size) is not int or size < 1):
            raise CheckpointError(f"{common.path}: {_WORDS} in {INFO} is {str(size)[:80]!r}, not a number of words")
        cuts = _Cuts(
            {kind: tuple(_pattern(text, common.path) for text in _list(info, kind, common.path)) for kind in _KINDS},
            tuple(one for told in _list(info, _SEVERAL, common.path) for one in _several(told, info, common.path)),
            size,
        )
        cuts._check_tries([*common.trained, *common.frozen_shapes, *common.buffers], common.path)
        return cuts

    def _check_tries(self, names: Sequence[str], path: Path) -> None:
        """Raise CheckpointError if the patterns could take hours on these names."""
        patterns = [one for kind in self.patterns.values() for one in kind] + [one.pattern for one in self.several]
        powers, lengths = Counter(_repeats(one.pattern) for one in patterns), Counter(map(len, names))
        tries = sum(n * many * size ** max(1, power) for power, n in powers.items() for size, many in lengths.items())
        if tries > _MOST_TRIES:
            raise CheckpointError(
                f"{path}: the {len(patterns)} patterns in {INFO} are refused: on {len(names)} names of up to "
                f"{max(lengths)} characters they could run for hours"
            )

    def has(self, kind: str, name: str) -> bool:
        return any(pattern.match(name) for pattern in self.patterns[kind])

    def several_in(self, name: str) -> _Several | None:
        """What is known of a parameter that holds several weights; None for others."""
        if self.has(_BLOCKS, name):
            return _Several(re.compile(""), 2, None)
        return next((one for one in self.several if one.pattern.match(name)), None)

    def known(self, name: str) -> bool:
        """Whether any pattern tells of `name`."""
        return self.several_in(name) is not None or any(self.has(kind, name) for kind in self.patterns)

    def buffer(self, name: str, parts: Sequence[Lazy], where: Path) -> Lazy:
        """A buffer of all ranks; those that no pattern tells of are whole on each."""
        if self.known(name):
            return _whole(name, parts, self, f"{where}: buffer {name!r}")
        return Copies(tuple(parts), f"{where}: nothing says how buffer {name!r} was cut over the tensor-parallel ranks")


def _list(info: Info, key: str, path: Path) -> list[Any]:
    value = info.get(key) or []
    if not isinstance(value, list | tuple):
        raise CheckpointError(f"{path}: {key} in {INFO} is {str(value)[:80]!r}, not a list")
    return [*value]


def _pattern(text: Any, path: Path) -> re.Pattern[str]:
    if not isinstance(text, str):
        raise CheckpointError(f"{path}: a pattern in {INFO} is {str(text)[:80]!r}, no text")
    plain = len(text) <= _LONGEST and _QUIET.fullmatch(text)
    if not plain or _repeats(text) > _REPEATS:
        raise CheckpointError(f"{path}: the pattern {text[:80]!r} in {INFO} is refused: it could run long")
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"{path} is damaged: the pattern {text!r} in {INFO}: {error}") from error


def _repeats(text: str) -> int:
    return sum(text.count(sign) for sign in "*+?")


def _several(told: Any, info: Info, path: Path) -> list[_Several]:
    """The patterns of one entry of `parameter_with_sub_params`."""
    if not isinstance(told, dict) or not isinstance(told.get("shape"), list | tuple) or not told["shape"]:
        raise CheckpointError(f"{path} is damaged: {_SEVERAL} has {str(told)[:80]!r}")
    if told.get("partition_dim") != 0:
        raise CheckpointError(
            f"{path}: several weights in one that are cut along dim {told.get('partition_dim')!r} ({_SEVERAL}) are not "
            "imported, only along dim 0"
        )
    rows, every = told["shape"][0], info.get(_WIDTHS) or {}
    if not isinstance(every, dict):
        raise CheckpointError(f"{path}: {_WIDTHS} in {INFO} is {str(every)[:80]!r}, not an object")
    rows = rows if type(rows) is int and rows > 0 else _numbers(rows, path)
    found: list[_Several] = []
    for text in _list(told, "patterns", path):
        widths = every.get(text)
        read = None if widths is None else tuple(_numbers(one, path) for one in widths)
        found.append(_Several(_pattern(text, path), rows, read))
    return found


def _numbers(value: Any, path: Path) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(one) is int and one >= 0 for one in value):
        raise CheckpointError(f"{path} is damaged: {_SEVERAL} has rows {str(value)[:80]!r}")
    return tuple(value)


def _joined(name: str, parts: Sequence[Parameter], cuts: _Cuts, where: Path) -> Parameter:
    first = parts[0]
    if any(part.moments.keys() != first.moments.keys() for part in parts):
        raise CheckpointError(f"{where}: {name!r} has other moments on other tensor-parallel ranks")
    weights = [part.weight for part in parts]
    if not cuts.known(name) and _same_start(weights):
        raise CheckpointError(
            f"{where}: no pattern of {INFO} tells of {name!r}, so it would be joined by rows, but all ranks hold the "
            f"same values; list it in {_WHOLE} (--universal-checkpoint-info FILE)"
        )
    told = f"{where}: {name!r}"
    check_same([part.step for part in parts], f"the step count of {name!r}", where)
    weight = _whole(name, weights, cuts, told)
    moments = {
        key: _whole(name, [part.moments[key] for part in parts], cuts, f"{told} ({key})") for key in first.moments
    }
    return replace(first, weight=weight, moments=moments)


def _converted(parameter: Parameter, commons: Sequence[Common], cuts: _Cuts, where: Path) -> Parameter:
    """A parameter that DeepSpeed's converter has joined; raises CheckpointError if the ranks' parts make another."""
    name = parameter.name
    parts = [common.trained[name] for common in commons]
    shape, whole = parameter.shape, list(parts[0])
    dim = 1 if cuts.has(_COLUMNS, name) and len(whole) > 1 and cuts.several_in(name) is None else 0
    if whole and not cuts.has(_WHOLE, name) and not cuts.has(_MEAN, name):
        whole[dim] = sum(part[dim] for part in parts)
    words = cuts.vocabulary if cuts.has(_VOCABULARY, name) else None
    cut = words is not None and bool(shape) and words <= shape[0] <= whole[0]  # rows after the vocabulary are padding
    if list(shape) != whole and not (cut and list(shape[1:]) == whole[1:]):
        raise CheckpointError(
            f"{where}: {name!r} has shape {list(shape)} in the folder zero, but by {INFO} the parts of the ranks, "
            f"{[list(part) for part in parts]}, make {whole}: files of several saves were mixed, so convert them again"
        )
    forward = [one for common in commons if isinstance(one := common.module.get(name), StoredTensor)]
    if (
        commons[0].differ or [one.shape for one in forward] != parts
    ):  # pipelines have these in files that are not copied
        return parameter
    told = f"{where}: {name!r}"
    rounding = _whole(name, forward, cuts, told)
    return replace(parameter, weight=must_round(parameter.weight, [rounding], f"{told}: the master weights"))


def _same_start(parts: Sequence[Lazy]) -> bool:
    """Whether all ranks have the same values at the start, and not one value only, as new biases have."""
    if not parts[0].shape or any(part.shape != parts[0].shape for part in parts):
        return False
    starts = [part.read_flat(0, min(_LOOKED_AT, numel(part.shape))) for part in parts]
    return all(start.equal(starts[0]) for start in starts) and not bool((starts[0] == starts[0][:1]).all())


def _whole(name: str, parts: Sequence[Lazy], cuts: _Cuts, told: str) -> Lazy:
    """The whole tensor of the parts of all ranks; `told` names it in messages."""
    if cuts.has(_WHOLE, name) or not parts[0].shape:
        says = f"{told} is whole on each tensor-parallel rank by {INFO} (list it in {_MEAN} instead to take the mean)"
        whole: Lazy = Copies(tuple(parts), says)
    elif cuts.has(_MEAN, name):
        whole = Mean(tuple(parts), told)
    else:
        try:
            whole = _put_together(name, parts, cuts)
        except CheckpointError as error:
            raise CheckpointError(f"{told}: {error}") from error
    words = cuts.vocabulary if cuts.has(_VOCABULARY, name) else None
    if words is None or not whole.shape or words == whole.shape[0]:
        return whole
    if words > whole.shape[0]:
        raise CheckpointError(f"{told} has {whole.shape[0]} rows, fewer than {_WORDS} of {INFO}, {words}")
    kept = (words, *whole.shape[1:])  # rows after the vocabulary are padding
    return Joined(kept, (Piece(whole, 0, numel(kept)),), whole.dtype)


def _put_together(name: str, parts: Sequence[Lazy], cuts: _Cuts) -> Lazy:
    shape, dtype = parts[0].shape, parts[0].dtype
    several = cuts.several_in(name)
    if several is None and cuts.has(_COLUMNS, name) and len(shape) > 1:
        if any((*part.shape[:1], *part.shape[2:]) != (*shape[:1], *shape[2:]) for part in parts):
            raise CheckpointError(
                f"parts of shapes {[list(part.shape) for part in parts]} do not fit together by columns"
            )
        widths = [part.shape[1] for part in parts]
        offsets = [sum(widths[:number]) for number in range(len(parts))]
        tiles = [Tile((0, offset, *(0 for _ in shape[2:])), part) for offset, part in zip(offsets, parts, strict=True)]
        return Tiled((shape[0], sum(widths), *shape[2:]), tuple(tiles), dtype)
    if any(part.shape[1:] != shape[1:] for part in parts):
        raise CheckpointError(f"parts of shapes {[list(part.shape) for part in parts]} do not fit together by rows")
    held, row = [part.shape[0] for part in parts], numel(shape[1:])
    widths = [tuple(held)] if several is None else several.on_ranks(held)
    pieces: list[Piece] = []
    done = [0] * len(parts)
    for of_weight in widths:
        for rank, rows in enumerate(of_weight):
            pieces.append(Piece(parts[rank], done[rank] * row, rows * row))
            done[rank] += rows
    return Joined((sum(held), *shape[1:]), tuple(pieces), dtype)

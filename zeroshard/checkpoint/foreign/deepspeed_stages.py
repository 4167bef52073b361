"""Reads the stages of a DeepSpeed pipeline as one checkpoint, each of one or several tensor-parallel ranks.

    layer_LL-model_states.pt                             a layer's weights in the forward's dtype, by its own names
    layer_LL-model_YY-model_states.pt                    the same, of tensor-parallel rank Y
    mp_rank_MM_model_states.pt                           a rank of a stage: names and shapes in flat order, counters
    zero_pp_rank_R_mp_rank_MM_optim_states.pt            the part of its rank R

    4 ranks MM, 2 tensor-parallel:     | 00 stage 0, Y 0 | 01 stage 0, Y 1 | 02 stage 1, Y 0 | 03 stage 1, Y 1 |

The last is how DeepSpeed's own topology counts; one whose first axis is "model" counts stages first, and the names of
parameters tell which it was. Names on all stages are those of the whole model (`3.weight`, `tied_modules.K.weight`), so
the tensor-parallel ranks of each stage are joined (`deepspeed_tensors`), then the stages. A tied module is on several
stages; the first one's values are taken, which DeepSpeed too sends to the others when it loads. Its parameters get the
names of zeroshard's PipelineModule, and DeepSpeed's as aliases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.foreign.contents import Contents, Group
from zeroshard.checkpoint.foreign.deepspeed_common import Common, Files, check_one_save, mapping
from zeroshard.checkpoint.foreign.deepspeed_layers import TIED, LayerFiles, Layers, names_of
from zeroshard.checkpoint.foreign.deepspeed_tensors import Info, joined_parts
from zeroshard.checkpoint.foreign.deepspeed_universal import open_rank
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.errors import CheckpointError


def is_pipeline(files: Files) -> bool:
    """Whether a model-parallel rank is one of a pipeline, which stores weights by layer."""
    path = files.model[0]
    return mapping(load(path), path, "the content").get("module", {}) is None


def open_stages(ranks: Sequence[Files], layers: LayerFiles, info: Info | None) -> Contents:
    """The contents of a pipeline's checkpoint.

    Args:
        ranks: the files of each model-parallel rank.
        layers: the files of the layers; a universal checkpoint has none.
        info: how tensor-parallel ranks were cut, in place of the checkpoint's own; None for that.

    Raises:
        CheckpointError: files are missing or damaged, stages differ, or nothing says how weights were cut.
    """
    where = ranks[0].folder
    if not layers and not ranks[0].universal:
        raise CheckpointError(f"{where} holds the ranks of a pipeline, but its layers are missing (layer_*_states.pt)")
    states = [mapping(load(files.model[0]), files.model[0], "the content") for files in ranks]
    different = len({frozenset(names_of(state)) for state in states})
    grid = _grid(states, len(layers) or len(states) // different, where)
    held = Layers.read(layers, states, where)
    found = [_stage(number, [ranks[rank] for rank in stage], held, info) for number, stage in enumerate(grid)]
    check_one_save(found, where)
    contents = _joined(found, where)
    if layers:
        return contents
    gone = (
        "dtypes of the forward, frozen weights and buffers: a universal checkpoint of a pipeline has no file of a layer"
    )
    return replace(contents, left_out=(*contents.left_out, gone))


def _joined(found: Sequence[Contents], where: Path) -> Contents:
    """The contents of all stages."""
    parameters = dict(found[0].parameters)
    for contents in found[1:]:
        for name, parameter in contents.parameters.items():
            if name in parameters and TIED.fullmatch(name) is None:
                raise CheckpointError(
                    f"{where}: {name!r} is on several stages, though it is of no tied layer: files of several ranks or "
                    "saves were mixed, so copy the checkpoint again"
                )
            if parameters.setdefault(name, parameter).shape != parameter.shape:
                raise CheckpointError(f"{where}: {name!r} has several shapes on the stages that hold it")
    renamed = {name: _named_here(name) for name in parameters}
    aliases = {alias: renamed[name] for contents in found for alias, name in contents.aliases.items()}
    return replace(
        found[0],
        origin=f"{found[0].origin}, {len(found)} pipeline stages",
        parameters={renamed[name]: replace(one, name=renamed[name]) for name, one in parameters.items()},
        buffers={_named_here(name): value for contents in found for name, value in contents.buffers.items()},
        aliases=aliases | {name: own for name, own in renamed.items() if name != own},
        groups=tuple(Group(tuple(renamed[name] for name in group.names), group.options) for group in _groups(found)),
        complete=all(contents.complete for contents in found),
        left_out=tuple(dict.fromkeys(line for contents in found for line in contents.left_out)),
    )


def _grid(states: Sequence[Mapping[str, Any]], parts: int, where: Path) -> list[list[int]]:
    """The model-parallel ranks of each stage, in the order of tensor-parallel ranks, of which there are `parts`."""
    count = len(states)
    stages, rest = divmod(count, parts)
    told = states[0].get("mp_world_size", count)
    dims = states[0].get("checkpoint_parallel_dimensions")
    said = (dims.get("pp_degree"), dims.get("tp_degree")) if isinstance(dims, dict) else (stages, parts)
    if rest or told != count or said != (stages, parts):
        raise CheckpointError(
            f"{where} holds the files of {count} model-parallel ranks, of {told}, and layers of {parts} tensor-"
            f"parallel ranks; {said[0]} stages of {said[1]} saved it: files are missing or left from an earlier save"
        )
    names = [frozenset(names_of(state)) for state in states]
    by_stage = [[stage * parts + part for part in range(parts)] for stage in range(stages)]
    by_part = [[part * stages + stage for part in range(parts)] for stage in range(stages)]
    for grid in (by_stage, by_part):
        if all(len({names[rank] for rank in ranks}) == 1 for ranks in grid):
            return grid
    raise CheckpointError(f"{where}: tensor-parallel ranks of a stage have parameters of different names")


def _stage(number: int, ranks: Sequence[Files], layers: Layers, info: Info | None) -> Contents:
    """The contents of one stage. The first one gets the layers that none has trained parameters of."""
    read = [Common.read(files, layers.module_of(part, number == 0)) for part, files in enumerate(ranks)]
    commons = [replace(common, copies=layers.copies_of(part, common.state)) for part, common in enumerate(read)]
    return open_rank(ranks[0], commons[0], 1) if len(ranks) == 1 else joined_parts(ranks, commons, info)


def _named_here(name: str) -> str:
    """The name of a parameter in zeroshard's PipelineModule, which stores a tied module in a wrapper."""
    match = TIED.fullmatch(name)
    return name if match is None else f"{name[: match.start(1)]}module.{match[1]}"


def _groups(stages: Sequence[Contents]) -> tuple[Group, ...]:
    """Joins the groups with the same number on all stages; a tied parameter is in them once."""
    counts = {len(contents.groups) for contents in stages}
    if len(counts) > 1:
        raise CheckpointError(f"stages have {sorted(counts)} optimizer groups; give all of them the same number")
    found: list[Group] = []
    for number, group in enumerate(stages[0].groups):
        names = dict.fromkeys(name for contents in stages for name in contents.groups[number].names)
        found.append(Group(tuple(names), group.options))
    return tuple(found)

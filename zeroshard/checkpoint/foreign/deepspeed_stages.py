"""Reads the stages of a DeepSpeed pipeline as one checkpoint.

    layer_LL-model_states.pt                             a layer's weights in the forward's dtype, by its own names
    mp_rank_SS_model_states.pt                           stage S: names and shapes in flat order, counters
    zero_pp_rank_R_mp_rank_SS_optim_states.pt            the part of stage S's rank R

Names on all stages are those of the whole model (`3.weight`, `tied_modules.KEY.weight`), so the stages are read one
after the other and joined. A tied module is on several stages, with equal values; its parameters get the names of
zeroshard's PipelineModule, and DeepSpeed's as aliases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.foreign.contents import Contents, Group
from zeroshard.checkpoint.foreign.deepspeed_common import Common, Files, mapping
from zeroshard.checkpoint.foreign.deepspeed_flat import open_flat
from zeroshard.checkpoint.foreign.stored import StoredTensor
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.errors import CheckpointError

LAYER = re.compile(r"layer_(\d+)-model_states\.pt")
_TIED = re.compile(r"tied_modules\.[^.]+\.(.+)")


def open_stages(stages: Sequence[Files], layers: Mapping[int, Path]) -> Contents:
    """The contents of a pipeline's checkpoint.

    Args:
        stages: the files of each stage.
        layers: the file of each layer that has parameters or buffers.

    Raises:
        CheckpointError: files are missing or damaged, or stages differ in a parameter.
    """
    held = {number: mapping(load(path), path, "the content") for number, path in layers.items()}
    found = [open_flat(files, Common.read(files, lambda state: _module(state, held))) for files in stages]
    origin = f"{found[0].origin}, {len(found)} pipeline stages"
    for contents in found[1:]:
        if (contents.steps, contents.skipped) != (found[0].steps, found[0].skipped):
            raise CheckpointError(
                f"{stages[0].folder} holds stages of several saves: steps {found[0].steps} and others"
            )
    parameters = dict(found[0].parameters)
    for contents in found[1:]:
        for name, parameter in contents.parameters.items():
            if parameters.setdefault(name, parameter).shape != parameter.shape:
                raise CheckpointError(f"{stages[0].folder}: {name!r} has several shapes on the stages that hold it")
    renamed = {name: _named_here(name) for name in parameters}
    aliases = {alias: renamed[name] for contents in found for alias, name in contents.aliases.items()}
    return replace(
        found[0],
        origin=origin,
        parameters={renamed[name]: replace(one, name=renamed[name]) for name, one in parameters.items()},
        buffers={name: value for contents in found for name, value in contents.buffers.items()},
        aliases=aliases | {name: own for name, own in renamed.items() if name != own},
        groups=tuple(Group(tuple(renamed[name] for name in group.names), group.options) for group in _groups(found)),
        complete=all(contents.complete for contents in found),
        left_out=tuple(dict.fromkeys(line for contents in found for line in contents.left_out)),
    )


def _named_here(name: str) -> str:
    """The name of a parameter in zeroshard's PipelineModule, which stores a tied module in a wrapper."""
    match = _TIED.fullmatch(name)
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


def _module(state: Mapping[str, Any], layers: Mapping[int, Mapping[Any, Any]]) -> dict[str, Any]:
    """A stage's parameters and buffers from the layers' files, by the names of the whole model."""
    names = [name for group in state.get("param_shapes") or () for name in group]
    buffers = list(state.get("buffer_names") or ())
    numbers = {int(name.split(".", 1)[0]) for name in (*names, *buffers) if name.split(".", 1)[0].isdigit()}
    found = {f"{number}.{key}": value for number in sorted(numbers) for key, value in layers.get(number, {}).items()}
    for name in names:
        match = _TIED.fullmatch(name)
        same = (value for layer in layers.values() for key, value in layer.items() if match and key == match[1])
        shape = next((tuple(group[name]) for group in state["param_shapes"] if name in group), ())
        value = next((one for one in same if isinstance(one, StoredTensor) and one.shape == shape), None)
        if value is not None:
            found[name] = value
    return found

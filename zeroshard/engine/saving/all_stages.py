"""Collects what a checkpoint needs from all pipeline stages: parameter names, and the members of optimizer groups.

Each rank writes and reads its own tensors, by the names of the whole model. But a name is missing only if all stages
lack it, and an optimizer group is saved with its members on all stages. Rejected: a checkpoint per stage, which could
not be loaded in another layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.saving.saved_model import persistent_buffers
from zeroshard.engine.saving.saved_options import group_names
from zeroshard.engine.step.attached import find_optimizer
from zeroshard.errors import CheckpointError


@dataclass(frozen=True)
class WholeModel:
    """The names of all stages.

    Attributes:
        names: of parameters and buffers, other names of tied weights too.
        aliases: other name of a parameter -> its name.
        groups: by optimizer group, the names of its parameters; None without an optimizer.
    """

    names: frozenset[str]
    aliases: Mapping[str, str]
    groups: Sequence[Sequence[str]] | None


def whole_model(handle: Handle, model: nn.Module) -> WholeModel:
    """The names of this model and, in a pipeline, of all other stages; called by all ranks.

    Raises:
        CheckpointError: the stages have other numbers of optimizer groups, so that none can be named by its number.
    """
    optimizer = find_optimizer(model)
    groups = None if optimizer is None else group_names(optimizer)
    names = [segment.name for _, group in handle.plan.groups() for segment in group.layout.segments]
    own = WholeModel(frozenset([*names, *persistent_buffers(model)]), handle.plan.aliases, groups)
    stages = handle.comm.stages
    if stages is None:
        return own
    texts = stages.gather_text(json.dumps([sorted(own.names), dict(own.aliases), own.groups]))
    parts = [WholeModel(frozenset(names), aliases, groups) for names, aliases, groups in map(json.loads, texts)]
    counts = [0 if part.groups is None else len(part.groups) for part in parts]
    if len(set(counts)) > 1:
        raise CheckpointError(
            f"the optimizers of pipeline stages have {', '.join(map(str, counts))} parameter groups, and a checkpoint "
            "keeps them by number: give the optimizer of every stage the same groups, empty ones too"
        )
    return WholeModel(
        frozenset(name for part in parts for name in part.names),
        {alias: name for part in parts for alias, name in part.aliases.items()},
        None if own.groups is None else [_all_members(parts, number) for number in range(counts[0])],
    )


def _all_members(parts: Sequence[WholeModel], number: int) -> list[str]:
    """The members of a group on all stages, one that several hold once."""
    return list(dict.fromkeys(name for part in parts if part.groups is not None for name in part.groups[number]))

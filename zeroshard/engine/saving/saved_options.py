"""Saves hyper-parameters and counters as plain numbers, and loads them in the types that this run uses.

    lr = torch.tensor(1e-3)   saved as 0.001   loaded by filling the tensor that this run has
    lr = numpy.float32(1e-3)  saved as 0.001   loaded as numpy.float32

A value that can't be saved is an error at the save, which names it; a value of another kind is an error at the load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeroshard.checkpoint.values import as_numbers, converted_like, kind_differences, pack, unpack
from zeroshard.engine.outside_step.gathered import name_of
from zeroshard.errors import CheckpointError
from zeroshard.optim.optimizer import ShardedOptimizer

_MEMBERS = ("params", "param_names")


def saved_groups(optimizer: ShardedOptimizer, members: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The groups for a checkpoint. Raises CheckpointError naming group and key of what can't be kept.

    Args:
        members: the names of each group's parameters, those of other pipeline stages too.
    """
    return [
        {"names": list(names), "options": pack(_options(group), f"optimizer group {number}")}
        for number, (names, group) in enumerate(zip(members, optimizer.param_groups, strict=True))
    ]


def group_names(optimizer: ShardedOptimizer) -> list[list[str]]:
    """The names of each group's parameters."""
    return [[name_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: as_numbers(value) for key, value in group.items() if key not in _MEMBERS}


def group_problems(saved: Sequence[Mapping[str, Any]], optimizer: ShardedOptimizer) -> Iterator[str]:
    """What of saved groups' options can't be loaded."""
    for number, (theirs, group) in enumerate(zip(saved, optimizer.param_groups, strict=False)):
        options, own = unpack(theirs["options"]), _options(group)
        for key in options:
            if key in _MEMBERS or not isinstance(key, str):
                yield f"optimizer group {number}: {key!r} is no hyper-parameter"
        yield from kind_differences(options, own, f"optimizer group {number}")


def restore_groups(saved: Sequence[Mapping[str, Any]], optimizer: ShardedOptimizer) -> None:
    """Take over saved options of which there are no `group_problems`."""
    for theirs, group in zip(saved, optimizer.param_groups, strict=True):
        for key, value in unpack(theirs["options"]).items():
            group[key] = converted_like(value, group.get(key))


def counter_problems(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """What an optimizer's saved counters lack, or have of another kind."""
    for key in sorted(own.keys() - saved.keys()):
        yield f"its optimizer's state lacks {key!r}"
    yield from kind_differences(saved, as_numbers(dict(own)), "optimizer counters", same_length=False)


def check_engine_counters(counters: Mapping[str, Any]) -> None:
    """Raises CheckpointError for what no engine has counted. A native save has none."""
    missing = {"micro_steps", "global_steps", "skipped_steps", "accumulation"} - counters.keys()
    if counters and missing:
        raise CheckpointError(f"counters.{min(missing)} is missing")
    counted = [(name, value) for name, value in counters.items() if name != "data"]
    for place in counters.get("data", []):
        counted += [(f"data.{key}", place.get(key)) for key in ("epoch", "offset", "samples")]
    for name, value in counted:
        if type(value) is not int or not 0 <= value < 2**63:
            raise CheckpointError(f"counters.{name} is {value!r}")

"""Write a plain checkpoint of `torch.distributed.checkpoint` that FSDP2 code loads with `dcp.load`.

The keys are those of `get_state_dict`: {"model": {NAME: tensor}, "optim": {"state": {NAME: {"exp_avg": ...}},
"param_groups": [...]}}, or flattened as torchtitan has them. torch's own writer writes it, in this process alone; it
asks its planner for a tensor just before it writes it, and our planner reads it then. It keeps the tensors of a file
until the file is complete, so each has a file of its own. DCP has no names for one tensor under two, so tied weights
are written under each.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import MetadataIndex

from zeroshard.checkpoint.export.safetensors_stream import Progress
from zeroshard.checkpoint.foreign.contents import Contents, Group
from zeroshard.checkpoint.foreign.stored import InMemory, Lazy
from zeroshard.errors import CheckpointError, UsageError

_TORCH: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
}


class LazyPlanner(DefaultSavePlanner):
    """Plans with tensors of the meta device, and reads each when it is written."""

    def __init__(self, tensors: Mapping[str, Lazy], progress: Progress) -> None:
        super().__init__()
        self._tensors = tensors
        self._progress = progress

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self._tensors.get(index.fqn)
        if tensor is None:
            return super().lookup_object(index)
        value = tensor.read()
        self._progress(value.nbytes)
        return value


def state_dict_of(contents: Contents, flat: bool = False) -> tuple[dict[str, Any], dict[str, Lazy]]:
    """The nested dict with lazies at its leaves replaced by meta tensors, and the lazies by DCP's flat key."""
    lazies: dict[str, Lazy] = {}

    def meta(key: str, tensor: Lazy) -> torch.Tensor:
        lazies[key] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    weights = {name: parameter.weight for name, parameter in contents.parameters.items()} | dict(contents.buffers)
    weights |= {alias: weights[name] for alias, name in contents.aliases.items()}
    root = "" if flat else "model."
    model = {name: meta(root + name, tensor) for name, tensor in weights.items()}
    state: dict[str, Any] = {}
    above = "optimizer" if flat else "optim"
    for name, parameter in contents.parameters.items():
        kinds: dict[str, Lazy] = dict(parameter.moments)
        if kinds and parameter.step is not None:
            kinds["step"] = InMemory(torch.tensor(float(parameter.step)))
        for kind, tensor in kinds.items():
            value = meta(f"{above}.state.{name}.{kind}", tensor)
            if flat:
                state[f"state.{name}.{kind}"] = value
            else:
                state.setdefault(name, {})[kind] = value
    if flat:
        state |= {
            f"param_groups.{name}.{key}": value
            for group in contents.groups
            for name in group.names
            for key, value in _options(contents, group).items()
        }
        return {**model, **({"optimizer": state} if state else {})}, lazies
    groups = [{"params": list(group.names), **_options(contents, group)} for group in contents.groups]
    return {"model": model, **({"optim": {"state": state, "param_groups": groups}} if state else {})}, lazies


def _options(contents: Contents, group: Group) -> dict[str, Any]:
    """Hyper-parameters as torch has them: pairs such as betas are tuples, and all that its optimizer has are there."""
    kind = _TORCH.get(contents.optimizer or "")
    defaults = {} if kind is None else kind([torch.zeros(1)]).defaults
    own = {key: tuple(value) if isinstance(value, list) else value for key, value in group.options.items()}
    return {**defaults, **own}


def export_dcp(
    contents: Contents, out: Path, flat: bool = False, progress: Progress = lambda count: None
) -> tuple[int, int]:
    """Write a DCP folder; returns the number of tensors and their bytes.

    Args:
        flat: torchtitan's keys instead of `get_state_dict`'s.

    Raises:
        CheckpointError: something can't be read or written; OUT is not there then.
        UsageError: OUT exists.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty; give the export a folder of its own")
    state, lazies = state_dict_of(contents, flat)
    partial = out.parent / f".{out.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        writer = FileSystemWriter(partial, single_file_per_rank=False, thread_count=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is what no_dist asks for
            save(state, storage_writer=writer, planner=LazyPlanner(lazies, progress), no_dist=True)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} can't be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(lazies), sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in lazies.values())

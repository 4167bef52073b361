"""Writes a plain checkpoint of `torch.distributed.checkpoint` that FSDP2 code loads with `dcp.load`.

The keys are those of `get_state_dict`: {"model": {NAME: tensor}, "optim": {"state": {NAME: {"exp_avg": ...}},
"param_groups": [...]}}, or flattened as in torchtitan. torch plans what is written from meta tensors, and writes the
metadata; this module writes the tensors, a chunk at a time. Rejected: torch's own writer, which keeps the tensors of a
file until the file is complete, and copies each once more. DCP has no aliases, so tied weights are written under each
name.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner, save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zeroshard.checkpoint.export.folder import new_folder, refuse_occupied
from zeroshard.checkpoint.export.safetensors_stream import Progress
from zeroshard.checkpoint.export.torch_file import save_tensor
from zeroshard.checkpoint.foreign.contents import Contents, Group
from zeroshard.checkpoint.foreign.stored import InMemory, Lazy
from zeroshard.checkpoint.temporary_files import write_synced

_TORCH: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
}


class StreamingWriter(FileSystemWriter):
    """Writes the tensors of a plan from `Lazy` tensors, a chunk at a time, each to its own file; else as torch does."""

    def __init__(self, folder: Path, tensors: Mapping[str, Lazy], progress: Progress) -> None:
        super().__init__(folder)
        self._folder = folder
        self._tensors = tensors
        self._progress = progress

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all items of this process's plan; the planner has meta tensors only."""
        results = []
        for number, item in enumerate(plan.items):
            file = self._folder / f"__0_{number}.distcp"
            tensor = self._tensors.get(item.index.fqn)
            if tensor is not None:
                save_tensor(file, tensor, self._progress)
            else:
                data = planner.resolve_data(item)
                assert isinstance(data, io.BytesIO)
                write_synced(file, data.getvalue())
            size = file.stat().st_size
            results.append(WriteResult(item.index, size, _StorageInfo(file.name, 0, size)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def state_dict_of(contents: Contents, flat: bool = False) -> tuple[dict[str, Any], dict[str, Lazy]]:
    """The state dict to save, with meta tensors, and the `Lazy` tensors for them by DCP's flat key."""
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
    """Hyper-parameters as in torch's optimizer: pairs such as betas are tuples, and missing ones have defaults."""
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
        CheckpointError: something can't be read or written; OUT is not made.
        UsageError: OUT exists and is not empty.
    """
    refuse_occupied(out)
    state, lazies = state_dict_of(contents, flat)
    with new_folder(out) as partial, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is what no_dist asks for
        save(state, storage_writer=StreamingWriter(partial, lazies, progress), no_dist=True)
    return len(lazies), sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in lazies.values())

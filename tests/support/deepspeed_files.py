"""Writes checkpoints of DeepSpeed pipelines with tensor-parallel ranks, in any layout, as DeepSpeed 0.19 lays them out.

`tests/checkpoint/deepspeed/stages_of_tensors.py` makes one with DeepSpeed itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

KEYS = ("fp32", "exp_avg", "exp_avg_sq")
KEY = "embedding"
_OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}


@dataclass(frozen=True)
class Held:
    """A parameter: master weight and moments of one process, and how tensor-parallel ranks divide it.

    Attributes:
        values: by key, all of one shape.
        cut: "whole", "rows", "columns", or "blocks": rows of each of `blocks` weights in one.
        blocks: rows of the weights.
        trained: whether the optimizer has it.
    """

    values: Mapping[str, torch.Tensor]
    cut: str = "whole"
    blocks: tuple[int, ...] = ()
    trained: bool = True

    def part(self, key: str, rank: int, ranks: int) -> torch.Tensor:
        """What one tensor-parallel rank has. Parts may be of unequal sizes."""
        whole = self.values[key]
        if self.cut == "whole":
            return whole
        if self.cut == "blocks":
            return torch.cat([one.tensor_split(ranks)[rank] for one in whole.split(list(self.blocks))])
        return whole.tensor_split(ranks, dim=int(self.cut == "columns"))[rank]


@dataclass(frozen=True)
class Layer:
    """A layer: parameters and buffers by name; the parameters of tied layers are those of the first one."""

    parameters: Mapping[str, Held]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tied: bool = False


@dataclass(frozen=True)
class Layout:
    """How a run was divided.

    Attributes:
        stages: the number of layers of each pipeline stage.
        parts: tensor-parallel ranks of each stage.
        data: data-parallel ranks.
        model_first: the topology's first axis is "model", so that model-parallel ranks count stages first.
        marked: the topology has an axis "model", so that the names of layers' files have its rank.
        bf16: DeepSpeed's bf16 optimizer saved, which stores padding and no stage.
    """

    stages: tuple[int, ...]
    parts: int
    data: int
    model_first: bool = False
    marked: bool = True
    bf16: bool = False

    def rank(self, stage: int, part: int) -> int:
        """The model-parallel rank."""
        return part * len(self.stages) + stage if self.model_first else stage * self.parts + part


def named(layers: Sequence[Layer]) -> dict[str, Held]:
    """All parameters under DeepSpeed's names, tied ones once."""
    pairs = ((number, key, layer) for number, layer in enumerate(layers) for key in layer.parameters)
    return {_name(number, key, layer): layer.parameters[key] for number, key, layer in pairs}


def write(folder: Path, layers: Sequence[Layer], layout: Layout, info: Mapping[str, Any] | None) -> Path:
    """Write the files into `folder` and return it."""
    folder.mkdir(parents=True)
    first = 0
    for stage, count in enumerate(layout.stages):
        own = {number: layers[number] for number in range(first, first + count)}
        for part in range(layout.parts):
            _write_rank(folder, own, layout, stage, part, info)
        first += count
    return folder


def write_universal(folder: Path, layers: Sequence[Layer], layout: Layout, info: Mapping[str, Any]) -> Path:
    """What DeepSpeed's converter makes of it, which copies no files of layers; rows after the vocabulary are kept."""
    write(folder, layers, layout, info)
    for path in [*folder.glob("layer_*"), *folder.glob("*zero_pp_rank_*")]:
        path.unlink()
    for name, held in named(layers).items():
        (folder / "zero" / name).mkdir(parents=True)
        for key in KEYS:
            torch.save({"cat_dim": 0, "param": held.values[key]}, folder / "zero" / name / f"{key}.pt")
        torch.save(torch.tensor(7.0), folder / "zero" / name / "step.pt")
    state = {"zero_stage": 1, "loss_scaler": None, "param_groups": [_OPTIONS], "ds_version": "0.19.8"}
    torch.save(state, folder / "zero" / "optimizer_state.pt")
    return folder


def write_stage_3(folder: Path, groups: Sequence[Mapping[str, Held]], data: int) -> Path:
    """A checkpoint of ZeRO stage 3 on `data` ranks, with these parameters in each sub-group; returns `folder`."""
    folder.mkdir(parents=True)
    names = [name for group in groups for name in group]
    for rank in range(data):
        state = {
            "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in names},
            "param_shapes": [{name: held.values["fp32"].shape for name, held in group.items()} for group in groups],
            "buffer_names": [],
            "frozen_param_shapes": None,
            "shared_params": {},
            "global_steps": 7,
            "global_samples": 84,
            "skipped_steps": 0,
            "mp_world_size": 1,
            "ds_version": "0.19.8",
        }
        torch.save(state, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flat = [{key: _shares(group.values(), key, rank, data) for key in KEYS} for group in groups]
        moments = {i: {"step": 7, **{key: one[key] for key in KEYS[1:]}} for i, one in enumerate(flat)}
        optimizer = {
            "zero_stage": 3,
            "loss_scaler": None,
            "partition_count": data,
            "fp32_flat_groups": [one["fp32"] for one in flat],
            "optimizer_state_dict": {
                "state": moments,
                "param_groups": [{**_OPTIONS, "params": list(range(len(groups)))}],
            },
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}, folder / name)
    return folder


def _shares(group: Iterable[Held], key: str, rank: int, data: int) -> torch.Tensor:
    """A rank's share of each parameter, one after the other; the last one's is padded."""
    found: list[torch.Tensor] = []
    for held in group:
        flat = held.values[key].flatten()
        size = -(-len(flat) // data)
        padded = torch.cat([flat, flat.new_zeros(size * data - len(flat))])
        found.append(padded[rank * size : (rank + 1) * size])
    return torch.cat(found)


def _name(number: int, key: str, layer: Layer) -> str:
    return f"tied_modules.{KEY}.{key}" if layer.tied else f"{number}.{key}"


def _write_rank(
    folder: Path, own: Mapping[int, Layer], layout: Layout, stage: int, part: int, info: Mapping[str, Any] | None
) -> None:
    """The files of one model-parallel rank."""
    parts = layout.parts
    for number, layer in own.items():
        content = {key: held.part("fp32", part, parts).bfloat16().clone() for key, held in layer.parameters.items()}
        marked = f"model_{part:02d}-" if layout.marked else ""
        torch.save(content | dict(layer.buffers), folder / f"layer_{number:02d}-{marked}model_states.pt")
    pairs = [(_name(n, key, layer), held) for n, layer in own.items() for key, held in layer.parameters.items()]
    trained = {name: held for name, held in pairs if held.trained}
    rank, ranks = layout.rank(stage, part), len(layout.stages) * parts
    state: dict[str, Any] = {
        "module": None,
        "param_shapes": [{name: held.part("fp32", part, parts).shape for name, held in trained.items()}],
        "buffer_names": [f"{number}.{key}" for number, layer in own.items() for key in layer.buffers],
        "frozen_param_shapes": None,
        "shared_params": {},
        "global_steps": 7,
        "global_samples": 84,
        "skipped_steps": 0,
        "dp_world_size": layout.data,
        "mp_world_size": ranks,
        "checkpoint_parallel_dimensions": {"pp_degree": len(layout.stages), "tp_degree": parts},
        "ds_version": "0.19.8",
        "epoch": 3,
    }
    if info is not None:
        state["universal_checkpoint_info"] = dict(info)
    torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")
    flat = {key: torch.cat([held.part(key, part, parts).flatten() for held in trained.values()]) for key in KEYS}
    for data in range(layout.data):
        name = f"{'bf16_' if layout.bf16 else ''}zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": _partition(flat, data, layout), "ds_version": "0.19.8"}, folder / name)


def _partition(flat: Mapping[str, torch.Tensor], data: int, layout: Layout) -> dict[str, Any]:
    """What one data-parallel rank's optimizer saves of the flat group."""
    total = len(flat["fp32"])
    size = -(-total // (2 * layout.data)) * 2
    padding = max(0, min(size, size * (data + 1) - total))
    padded = {key: torch.cat([value, value.new_zeros(size * layout.data - total)]) for key, value in flat.items()}
    own = {key: value[data * size : (data + 1) * size] for key, value in padded.items()}
    kept = {key: (value if layout.bf16 else value[: size - padding]).clone() for key, value in own.items()}
    moments = {key: value for key, value in kept.items() if key != "fp32"}
    state = {
        "single_partition_of_fp32_groups": [kept["fp32"]],
        "base_optimizer_state": {"state": {0: {**moments, "step": torch.tensor(7.0)}}, "param_groups": [_OPTIONS]},
        "group_paddings": [padding],
        "partition_count": [layout.data],
        "ds_version": "0.19.8",
    }
    return state if layout.bf16 else {**state, "zero_stage": 1, "loss_scaler": None}

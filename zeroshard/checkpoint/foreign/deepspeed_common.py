"""Reads what all kinds of DeepSpeed checkpoints have: shapes in flat order, buffers, aliases, counters, loss scale.

It is in rank 0's model file. The places of parameters depend on the kind; see `deepspeed_flat` and
`deepspeed_universal`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.foreign.contents import Contents, Parameter, Scaler, optimizer_name, plain
from zeroshard.checkpoint.foreign.inert import Inert
from zeroshard.checkpoint.foreign.stored import Lazy, StoredTensor, numel
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.checkpoint.manifest import check_name
from zeroshard.errors import CheckpointError

_OWN_KEYS_TEXT = (
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments "
    "lr_scheduler data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size "
    "ds_config ds_version checkpoint_parallel_dimensions universal_checkpoint_info num_experts ds_autoep_layers"
)
_OWN_KEYS = frozenset(_OWN_KEYS_TEXT.split())


@dataclass(frozen=True)
class Files:
    """The files of one tag, by data-parallel rank; those of experts by layer and by number among all experts."""

    folder: Path
    model: Mapping[int, Path]
    optim: Mapping[int, Path]
    universal: bool
    experts: Mapping[int, Mapping[int, Path]] = field(default_factory=dict)


@dataclass(frozen=True)
class Common:
    """The content of rank 0's model file: shapes in flat order, buffers, aliases, counters."""

    path: Path
    state: Mapping[str, Any]
    shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    frozen_shapes: Mapping[str, tuple[int, ...]]
    module: Mapping[str, Any]
    buffers: Mapping[str, Lazy]
    aliases: Mapping[str, str]
    left_out: tuple[str, ...]

    @staticmethod
    def read(files: Files, module_of: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None) -> Common:
        """Read rank 0's file; `module_of` returns the module's tensors if these are in other files."""
        path = files.model[0]
        state = load(path)
        if not isinstance(state, dict) or not isinstance(state.get("param_shapes"), list):
            raise CheckpointError(f"{path} is no ZeRO checkpoint of DeepSpeed (stage 0 is not imported)")
        module = mapping(state.get("module") if module_of is None else module_of(state), path, "module")
        shapes = tuple(_shapes(group, path) for group in state["param_shapes"])
        left_out: list[str] = []
        buffers: dict[str, Lazy] = {}
        for name in state.get("buffer_names") or ():
            value = module.get(check_name(name))
            if isinstance(value, StoredTensor):
                buffers[name] = value
            else:
                left_out.append(f"buffer {name}: it is not in {path.name}")
        aliases = {
            check_name(alias): check_name(name)
            for alias, name in mapping(state.get("shared_params") or {}, path, "shared_params").items()
        }
        frozen = _shapes(state.get("frozen_param_shapes") or {}, path)
        # DeepSpeed finds shared parameters by their address, which all parameters without elements share.
        trained = {name for group in shapes for name in group}
        aliases = {a: n for a, n in aliases.items() if n in trained or not _empty(n, frozen, module)}
        return Common(path, state, shapes, frozen, module, buffers, aliases, tuple(left_out))

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters that the optimizer holds, in flat order."""
        return {name: shape for group in self.shapes for name, shape in group.items()}

    def compute_dtype(self, name: str) -> torch.dtype | None:
        """The forward's dtype of `name`; None if it is not known. At stage 3 an empty tensor has it."""
        value = self.module.get(name)
        return value.dtype if isinstance(value, StoredTensor) else None

    def excluded(self, parameters: Mapping[str, Parameter]) -> list[str]:
        """Parameters of the model that the checkpoint lacks; at stage 3 it has an empty tensor for them."""
        return [
            name
            for name, value in self.module.items()
            if name not in parameters and name not in self.buffers and name not in self.aliases
            if isinstance(value, StoredTensor) and numel(value.shape) == 0
        ]

    def whole_frozen(self, left_out: list[str]) -> dict[str, Parameter]:
        """Parameters outside of the optimizer that the model file has whole: frozen ones and those without elements."""
        found: dict[str, Parameter] = {}
        for name, value in self.module.items():
            if name in self.trained or name in self.buffers or name in self.aliases:
                continue
            if isinstance(value, StoredTensor):
                found[check_name(name)] = Parameter(name, value, trainable=False)
            else:
                left_out.append(f"module.{name}: it is no tensor")
        return found

    def contents(self, origin: str, parameters: dict[str, Parameter], left_out: list[str], **rest: Any) -> Contents:
        """The contents: the parameters, with counters, scheduler and the user's state of the file."""
        state = self.state
        order = [name for name in self.module if name in parameters]
        order += [name for name in parameters if name not in self.module]
        left_out += [
            f"{alias}: it is {name}, which is not there"
            for alias, name in self.aliases.items()
            if name not in parameters
        ]
        scheduler = plain(state.get("lr_scheduler"), "lr_scheduler", left_out)
        client = {
            str(key): plain(value, f"client_state.{key}", left_out)
            for key, value in state.items()
            if key not in _OWN_KEYS
        }
        config = state.get("ds_config")
        config = config if isinstance(config, dict) else {}
        accumulation = config.get("gradient_accumulation_steps")
        groups = rest.get("groups", ())
        moments = {key for parameter in parameters.values() for key in parameter.moments}
        return Contents(
            origin=origin,
            optimizer=optimizer_name(groups, moments, _type_in_config(config, "optimizer")),
            accumulation=accumulation if type(accumulation) is int and accumulation > 0 else 1,
            scheduler_type=None if scheduler is None else _type_in_config(config, "scheduler"),
            complete=not self.excluded(parameters),
            parameters={name: parameters[name] for name in order},
            buffers=self.buffers,
            aliases={alias: name for alias, name in self.aliases.items() if name in parameters},
            steps=count(state.get("global_steps"), self.path, "global_steps"),
            skipped=count(state.get("skipped_steps"), self.path, "skipped_steps"),
            samples=count(state.get("global_samples"), self.path, "global_samples"),
            scheduler=scheduler,
            client_state=client,
            left_out=(*self.left_out, *left_out),
            **rest,
        )


def mapping(value: Any, path: Path, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: {what} is a {type(value).__name__}, not a dict")
    return value


def count(value: Any, path: Path, what: str) -> int:
    if value is not None and (type(value) is not int or value < 0):
        raise CheckpointError(f"{path} is damaged: {what} is {value!r}")
    return value or 0


def check_one_save(parts: Sequence[Contents], where: Path) -> None:
    """Raise CheckpointError if the parts of a divided model, as pipeline stages, have different counters."""
    counters = [(contents.steps, contents.skipped) for contents in parts]
    if any(one != counters[0] for one in counters):
        raise CheckpointError(f"{where} holds files of several saves: at steps {[steps for steps, _ in counters]}")


def _shapes(group: Any, path: Path) -> Mapping[str, tuple[int, ...]]:
    shapes = dict(mapping(group, path, "param_shapes"))
    for name, shape in shapes.items():
        check_name(name)
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise CheckpointError(f"{path} is damaged: {name!r} has shape {shape!r}")
        if numel(shape) >= 1 << 48:
            raise CheckpointError(f"{path}: {name!r} has an absurd shape, {list(shape)}; refused")
    return shapes


def _empty(name: str, frozen: Mapping[str, tuple[int, ...]], module: Mapping[str, Any]) -> bool:
    value = module.get(name)
    return numel(frozen[name] if name in frozen else value.shape if isinstance(value, StoredTensor) else (1,)) == 0


def _type_in_config(config: Mapping[str, Any], what: str) -> str | None:
    """The type of the optimizer or scheduler in a config; None if it has none."""
    section = config.get(what)
    found = section.get("type") if isinstance(section, dict) else None
    return found if isinstance(found, str) else None


def scaler_of(value: Any) -> Scaler | None:
    """The loss scale from DeepSpeed's scaler object; None if there is none, or a static scale of 1."""
    if not isinstance(value, Inert) or not isinstance(value.state, dict):
        return None
    scale = value.attribute("cur_scale", 1.0)
    dynamic = bool(value.attribute("dynamic", False))
    if type(scale) not in (int, float) or not 0 < scale < float("inf"):
        raise CheckpointError(f"the loss scale is {scale!r}")
    if not dynamic:
        return None if scale == 1 else Scaler(float(scale), False)
    last, now = value.attribute("last_overflow_iter", -1), value.attribute("cur_iter", 0)
    return Scaler(
        float(scale),
        True,
        window=value.attribute("scale_window"),
        factor=value.attribute("scale_factor"),
        minimum=value.attribute("min_scale"),
        hysteresis=value.attribute("cur_hysteresis"),
        since_overflow=now - last - 1 if type(now) is int and type(last) is int else None,
    )

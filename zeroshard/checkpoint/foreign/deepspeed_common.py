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
from zeroshard.checkpoint.foreign.stored import Lazy, ReadWhole, Rounded, StoredTensor, chunks, numel
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.checkpoint.manifest import check_name
from zeroshard.errors import CheckpointError

_OWN_KEYS_TEXT = (
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments "
    "lr_scheduler data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size "
    "ds_config ds_version checkpoint_parallel_dimensions universal_checkpoint_info num_experts ds_autoep_layers"
)
_OWN_KEYS = frozenset(_OWN_KEYS_TEXT.split())
_PRECISIONS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MOST = 1 << 62
_MOST_STEPS = float(1 << 48)


@dataclass(frozen=True)
class Files:
    """The files of one tag, by data-parallel rank; those of experts by layer and by number among all experts.

    Attributes:
        differ: master weights are taken though they do not round to the forward's weights.
    """

    folder: Path
    model: Mapping[int, Path]
    optim: Mapping[int, Path]
    universal: bool
    experts: Mapping[int, Mapping[int, Path]] = field(default_factory=dict)
    differ: bool = False


@dataclass(frozen=True)
class Common:
    """The content of rank 0's model file: shapes in flat order, buffers, aliases, counters.

    Attributes:
        differ: as in `Files`.
        copies: of parameters of which several files may have the forward's weights (tied layers): all of these.
    """

    path: Path
    state: Mapping[str, Any]
    shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    frozen_shapes: Mapping[str, tuple[int, ...]]
    module: Mapping[str, Any]
    buffers: Mapping[str, Lazy]
    aliases: Mapping[str, str]
    left_out: tuple[str, ...]
    differ: bool = False
    copies: Mapping[str, tuple[StoredTensor, ...]] = field(default_factory=dict)

    @staticmethod
    def read(files: Files, module_of: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None) -> Common:
        """Read rank 0's file; `module_of` returns the module's tensors if these are in other files."""
        path = files.model[0]
        state = load(path)
        if not isinstance(state, dict) or not isinstance(state.get("param_shapes"), list):
            raise CheckpointError(f"{path} is no ZeRO checkpoint of DeepSpeed (stage 0 is not imported)")
        if "global_steps" not in state:
            raise CheckpointError(f"{path} is damaged: it has no global_steps")
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
        _check_aliases(aliases, module, path)
        return Common(path, state, shapes, frozen, module, buffers, aliases, tuple(left_out), files.differ)

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters that the optimizer holds, in flat order."""
        return {name: shape for group in self.shapes for name, shape in group.items()}

    def compute_dtype(self, name: str) -> torch.dtype | None:
        """The forward's dtype of `name`; None if it is not known. At stage 3 an empty tensor has it."""
        value = self.module.get(name)
        return value.dtype if isinstance(value, StoredTensor) else None

    def rounded(self, name: str, weight: Lazy) -> Lazy:
        """The master weights of `name`, of which reads check that they round to the forward's weights.

        So files that do not belong together are noticed. At stage 3 no file has the forward's weights.

        Raises:
            CheckpointError: these have another shape.
        """
        value = self.module.get(name)
        if isinstance(value, StoredTensor) and numel(value.shape) and value.shape != weight.shape:
            raise CheckpointError(
                f"{self.path}: {name!r} has shape {list(weight.shape)} in param_shapes, but its weights have "
                f"{list(value.shape)}: files of several saves were mixed, so copy the checkpoint again"
            )
        found = self.copies.get(name) or ((value,) if isinstance(value, StoredTensor) else ())
        return must_round(weight, () if self.differ else found, f"{self.path.parent}: the master weights of {name!r}")

    def excluded(self, parameters: Mapping[str, Parameter]) -> list[str]:
        """Parameters of the model that the checkpoint lacks; at stage 3 it has an empty tensor for them."""
        return [
            name
            for name, value in self.module.items()
            if name not in parameters and name not in self.buffers and name not in self.aliases
            if isinstance(value, StoredTensor) and numel(value.shape) == 0
        ]

    def absent(self, parameters: Mapping[str, Parameter]) -> list[str]:
        """Sentences on what of stage 3 is not imported: parameters of no file, tensors of which nothing is told."""
        excluded = self.excluded(parameters)
        known = {*parameters, *self.buffers, *self.aliases, *excluded}
        return [f"{name}: it was excluded at the save" for name in excluded] + [
            f"{name}: {self.path.name} does not say whether it is a buffer" for name in self.module if name not in known
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
        self._check_trained(parameters, left_out)
        if not groups:
            left_out.append("hyper-parameters of the optimizer: the checkpoint has none")
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

    def _check_trained(self, parameters: Mapping[str, Parameter], left_out: list[str]) -> None:
        """Raise CheckpointError if what is trained is no floating-point tensor; note missing step counts."""
        trained = [one for one in parameters.values() if one.trainable and numel(one.shape)]
        for parameter in trained:
            for key, value in {"fp32": parameter.weight, **parameter.moments}.items():
                if not value.dtype.is_floating_point:
                    raise CheckpointError(
                        f"{self.path.parent} is damaged: {key} of {parameter.name!r} has dtype {value.dtype}"
                    )
        if any(one.moments and one.step is None for one in trained):
            left_out.append("step counts of the optimizer: the checkpoint has none")


def mapping(value: Any, path: Path, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: {what} is a {type(value).__name__}, not a dict")
    return value


def count(value: Any, path: Path, what: str) -> int:
    if value is not None and (type(value) is not int or not 0 <= value < _MOST):
        told = f"a number of {value.bit_length()} bits" if type(value) is int else f"{value!r:.80}"
        raise CheckpointError(f"{path} is damaged: {what} is {told}")
    return value or 0


def must_round(weight: Lazy, to: Sequence[Lazy], told: str) -> Lazy:
    """Master weights that must round to one of `to`, those in low precision; `told` names them in messages."""
    fit = tuple(one for one in to if one.shape == weight.shape and one.dtype in _PRECISIONS)
    if not fit or weight.dtype not in _PRECISIONS or not numel(weight.shape):
        return weight
    roundings = tuple(one if not isinstance(one, StoredTensor) or one.contiguous else ReadWhole(one) for one in fit)
    return Rounded(
        weight,
        roundings,
        f"{told} (optimizer files) do not round to the weights of the forward (model files): files of several ranks "
        "or saves were mixed, so copy the checkpoint again. If a program changed the model's weights itself after the "
        "last step (quantization, ZenFlow), --masters-differ imports the master weights",
    )


def check_one_save(parts: Sequence[Contents], where: Path) -> None:
    """Raise CheckpointError if the parts of a divided model, as pipeline stages, have different counters."""
    counters = [(contents.steps, contents.skipped, contents.samples) for contents in parts]
    if any(one != counters[0] for one in counters):
        told = [one[0] for one in counters]
        raise CheckpointError(
            f"{where} holds files of several saves: at steps {told}"
            if len(set(told)) > 1
            else f"{where} holds files of several saves: with skipped steps and samples {[one[1:] for one in counters]}"
        )


def check_same(values: Sequence[Any], what: str, where: Path) -> None:
    """Raise CheckpointError if ranks of one checkpoint have different values of `what`."""
    for rank, value in enumerate(values):
        if value != values[0]:
            first, other = values[0], value
            if isinstance(first, dict) and isinstance(other, dict):
                keys = [key for key in {**first, **other} if first.get(key) != other.get(key)]
                first, other = ({key: one.get(key) for key in keys} for one in (first, other))
            raise CheckpointError(
                f"{where} holds files of several saves: {what} is {str(first)[:160]} on rank 0, {str(other)[:160]} on "
                f"rank {rank}; copy the checkpoint again"
            )


def step_count(value: Any, path: Path) -> float | None:
    """A number of updates, from a number or a tensor with one; None for None. Raises CheckpointError for others."""
    if value is None:
        return None
    told: Any = value.read().item() if isinstance(value, StoredTensor) and numel(value.shape) == 1 else value
    if not isinstance(told, int | float) or not 0 <= told < _MOST_STEPS or told != int(told):
        raise CheckpointError(f"{path} is damaged: a step count is {str(told)[:80]}")
    return float(told)


def _shapes(group: Any, path: Path) -> Mapping[str, tuple[int, ...]]:
    shapes = dict(mapping(group, path, "param_shapes"))
    for name, shape in shapes.items():
        check_name(name)
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise CheckpointError(f"{path} is damaged: {name!r} has shape {shape!r}")
        if numel(shape) >= 1 << 48:
            raise CheckpointError(f"{path}: {name!r} has an absurd shape, {list(shape)}; refused")
    return shapes


def _check_aliases(aliases: Mapping[str, str], module: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if names that are said to be of one tensor have different values in the file."""
    for alias, name in aliases.items():
        one, other = module.get(alias), module.get(name)
        if not isinstance(one, StoredTensor) or not isinstance(other, StoredTensor) or one == other:
            continue
        same = one.shape == other.shape and one.dtype == other.dtype
        pairs = zip(chunks(one), chunks(other), strict=True) if same else ()
        if not same or any(not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
            raise CheckpointError(
                f"{path} is damaged: shared_params says that {alias!r} is another name of {name!r}, but they differ"
            )


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
    keys = ("scale_window", "scale_factor", "min_scale", "cur_hysteresis", "last_overflow_iter", "cur_iter")
    told = {key: value.attribute(key) for key in keys}
    for key, one in told.items():
        if one is not None and (type(one) not in (int, float) or not -1 <= one < _MOST):
            raise CheckpointError(f"the loss scaler is damaged: {key} is {str(one)[:80]}")
    last, now = told["last_overflow_iter"], told["cur_iter"]
    return Scaler(
        float(scale),
        True,
        window=told["scale_window"],
        factor=told["scale_factor"],
        minimum=told["min_scale"],
        hysteresis=told["cur_hysteresis"],
        since_overflow=max(0, now - last - 1) if type(now) is int and type(last) is int else None,
    )

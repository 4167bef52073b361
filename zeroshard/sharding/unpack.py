"""Gives the frozen tensors of quantized models to the engine as plain parameters, and takes them back at its close.

    before    linear.weight: a parameter, an Int8Tensor of `qdata` and `scale`
    between   linear.weight: the same Int8Tensor, an ordinary attribute; what it is made of are the parameters
              linear._weight_qdata and linear._weight_scale, which the engine shards, gathers and lets rest like any

So a forward reads `linear.weight` as before, and its operations meet resting parameters wherever the values are
elsewhere. Scales that a library keeps in objects of its own become parameters in the same way. Rejected: torch's
parametrizations, which make another class of the module and refuse `del linear.weight`, by which peft merges; and to
shard the bytes of the whole tensor as one, since all code that reads an attribute of it (`weight.dequantize()`) would
see no resting parameter, but wrong numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from zeroshard.errors import UsageError
from zeroshard.sharding.kept import (
    Inner,
    KeptAsIs,
    buffers_of_codes,
    inner_tensors,
    is_composed,
    scales_beside,
    scales_of,
)
from zeroshard.sharding.resting import is_resting

_UNPACKED = "_zeroshard_unpacked"
"""Attribute of a module with parameters or buffers that `unpack` has changed."""


@dataclass
class _Unpacked:
    """What `unpack` has changed in one module.

    Attributes:
        composed: the tensors made of others, by their names.
        parts: what each is made of; `Inner.tensor` is the parameter.
        scales: scales that are parameters now.
        buffers: names of parameters that were buffers.
        hook: of the module's `state_dict()`.
    """

    hook: RemovableHandle

    composed: dict[str, torch.Tensor] = field(default_factory=dict)
    parts: dict[str, Sequence[Inner]] = field(default_factory=dict)
    scales: list[Inner] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)


def unpack(model: nn.Module, device: torch.device) -> None:
    """Replace frozen parameters that are made of others by these, and buffers and scales of codes by parameters.

    Args:
        device: where tensors that are made of others have to be.

    Raises:
        UsageError: a tensor made of others is trained, has no values, or does not give up what it is made of.
    """
    done: dict[int, tuple[torch.Tensor, Sequence[Inner]]] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and is_composed(parameter):
                if id(parameter) not in done:
                    done[id(parameter)] = _take_apart(path, name, parameter, device)
                _replace(module, name, *done[id(parameter)])
        for inner in scales_beside(module):
            scale = inner if isinstance(inner.tensor, KeptAsIs) else inner.put(_kept(inner.tensor))
            module.register_parameter(scale.name, scale.tensor)  # pyright: ignore[reportArgumentType]
            _record(module).scales.append(scale)
        for name, buffer in buffers_of_codes(module).items():
            del module._buffers[name]
            module.register_parameter(name, _kept(buffer))
            _record(module).buffers.append(name)


def repack(model: nn.Module) -> None:
    """Undo `unpack` where the parameters have their values; modules whose parameters are sharded stay as they are."""
    for module in model.modules():
        found: _Unpacked | None = vars(module).get(_UNPACKED)
        if found is None:
            continue
        for name in list(found.parts):
            if not any(is_resting(part.tensor) for part in found.parts[name]):
                _put_together(module, name, found.composed.pop(name), found.parts.pop(name))
        for scale in [scale for scale in found.scales if not is_resting(scale.tensor)]:
            found.scales.remove(scale)
            scale.put(scale.tensor.data)
            module._parameters.pop(scale.name, None)
        for name in [name for name in found.buffers if not _rests(module, name)]:
            found.buffers.remove(name)
            parameter = module._parameters.pop(name, None)
            if parameter is not None:
                module.register_buffer(name, parameter.data)
        if not (found.parts or found.scales or found.buffers):
            found.hook.remove()
            del vars(module)[_UNPACKED]


def members_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a parameter is made of, or itself."""
    return [inner.tensor for inner in inner_tensors("", tensor)] if is_composed(tensor) else [tensor]


def parameters_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that stand for a parameter: its members, and its scales."""
    return [*members_of(tensor), *(inner.tensor for inner in scales_of("", tensor))]


def _kept(tensor: torch.Tensor) -> KeptAsIs:
    return KeptAsIs(tensor.detach().as_subclass(torch.Tensor), requires_grad=False)


def _record(module: nn.Module) -> _Unpacked:
    if _UNPACKED not in vars(module):
        vars(module)[_UNPACKED] = _Unpacked(module.register_state_dict_post_hook(_name_as_before))
    found: _Unpacked = vars(module)[_UNPACKED]
    return found


def _name_as_before(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    """A hook: `state_dict()` has what the library would save, where the values are there."""
    found: _Unpacked = vars(module)[_UNPACKED]
    for scale in found.scales:
        state.pop(f"{prefix}{scale.name}", None)  # the library saves it under a name of its own
    for name, parts in found.parts.items():
        if not any(is_resting(part.tensor) for part in parts):
            for part in parts:
                state.pop(f"{prefix}{part.name}", None)
            if vars(module).get(name) is found.composed[name]:
                state[f"{prefix}{name}"] = found.composed[name].detach()


def _rests(module: nn.Module, name: str) -> bool:
    parameter = module._parameters.get(name)
    return parameter is not None and is_resting(parameter)


def _take_apart(
    path: str, name: str, parameter: nn.Parameter, device: torch.device
) -> tuple[torch.Tensor, Sequence[Inner]]:
    """A tensor on `device` whose inner tensors are parameters, and these."""
    title, kind = f"parameter {f'{path}.{name}'.lstrip('.')!r}", type(parameter).__name__
    if parameter.requires_grad:
        raise UsageError(
            f"{title} is a {kind}, a tensor made of others (a quantized one, say), and requires a gradient: only "
            "frozen ones are sharded. Freeze it (requires_grad_(False)) and train adapters, or pass the model without "
            "this conversion"
        )
    if parameter.is_meta:
        raise UsageError(f"{title} is a {kind} without values; load the model before shard() or initialize()")
    found = list(inner_tensors(name, parameter))
    if any(is_resting(inner.tensor) for inner in found):
        if parameter.device != device:
            raise UsageError(f"{title} is sharded on {parameter.device}, but the engine is on {device}: load it there")
        return parameter, found
    whole = parameter if parameter.device == device else nn.Parameter(parameter.detach().to(device), False)
    parts: list[Inner] = []
    for inner in inner_tensors(name, whole):
        if is_traceable_wrapper_subclass(inner.tensor) or inner.tensor.layout is not torch.strided:
            raise UsageError(
                f"{title} is a {kind} whose {inner.attribute!r} is a {type(inner.tensor).__name__} in "
                f"{inner.tensor.layout}: only plain tensors are sharded. Quantize the model before it is divided"
            )
        parts.append(inner.put(_kept(inner.tensor)))
        if getattr(inner.owner, inner.attribute) is not parts[-1].tensor:
            raise UsageError(
                f"{title} is a {kind}, which does not let its {inner.attribute!r} be replaced, so it can't be sharded. "
                "Pass the model without this conversion"
            )
    return whole, parts


def _replace(module: nn.Module, name: str, whole: torch.Tensor, parts: Sequence[Inner]) -> None:
    """Put parameters in the place of the one that is made of them, which becomes an ordinary attribute."""
    _exchange(module, [name], {part.name: part.tensor for part in parts})
    vars(module)[name] = whole
    record = _record(module)
    record.composed[name], record.parts[name] = whole, parts


def _put_together(module: nn.Module, name: str, whole: torch.Tensor, parts: Sequence[Inner]) -> None:
    """Undo `_replace`. Where a library has set another weight meanwhile (merged, say), that one stays."""
    for part in parts:
        part.put(part.tensor.data)
    stays = vars(module).get(name) is whole
    if stays:
        del vars(module)[name]
    _exchange(module, [part.name for part in parts], {name: whole} if stays else {})


def _exchange(module: nn.Module, names: Sequence[str], others: Mapping[str, torch.Tensor]) -> None:
    """Replace parameters of a module by others, which take their place in the order of parameters."""
    before = dict(module._parameters)
    module._parameters.clear()
    for name, parameter in before.items():
        if name == names[0]:
            for other, value in others.items():
                module.register_parameter(other, value)  # pyright: ignore[reportArgumentType]
        if name not in names:
            module._parameters[name] = parameter

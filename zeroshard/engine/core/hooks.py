"""Registers the runtime's hooks on the modules of a model. They run before user hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.engine.core.autograd import in_backward
from zeroshard.engine.core.copied_gradients import CopiedGradients
from zeroshard.engine.core.forward import Forward
from zeroshard.engine.core.interrupted import is_nested_call
from zeroshard.engine.core.module_hooks import Hook, OutsideHook, PassHook, WholeUnitHook, registrable
from zeroshard.engine.core.runtime import Runtime
from zeroshard.engine.memory.guard import sharded_value
from zeroshard.errors import UsageError, ZeroShardError
from zeroshard.fp8.parameter import CodedGuard
from zeroshard.plan.dtypes import is_packed, torch_dtype
from zeroshard.sharding.marks import external_parameters
from zeroshard.sharding.opaque import reachable_parameters, takes_hooks
from zeroshard.sharding.units import unit_of


def install_hooks(model: nn.Module, runtime: Runtime) -> list[RemovableHandle]:
    """Hook every unit's module; returns the handles.

    Code that torch.compile generated earlier is discarded, since it would run without the hooks.
    """
    if _compiled(model):
        torch.compiler.reset()
    dtype = runtime.plan.policy.cast_inputs
    handles: list[RemovableHandle] = []
    for unit in runtime.units:
        if unit.plan.name == "":
            continue
        module = model.get_submodule(unit.plan.name)
        before = _of_unit(runtime, _entering(runtime.forward.pre_forward, unit.index))
        after = _of_unit(runtime, _after(runtime, unit.index))
        handles.append(module.register_forward_pre_hook(before, prepend=True))
        handles.append(module.register_forward_hook(after))
    for entry, module in enumerate(_entries(model, runtime)):
        if dtype is not None:
            cast = partial(_cast_inputs, torch_dtype(dtype))
            handles.append(module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True))
        enter = _of_pass(runtime, entry, _entering_model(runtime.forward, entry))
        leave = _of_pass(runtime, entry, _leaving(runtime.forward.leave, entry))
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    for module in _parts(model, runtime):
        part = id(module)
        enter = _of_pass(runtime, part, _entering(runtime.forward.enter_part, part))
        leave = _of_pass(runtime, part, _leaving(runtime.forward.leave_part, part))
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    if runtime.gradients.copies is not None:
        handles.append(model.register_forward_pre_hook(_noting(runtime.gradients.copies), with_kwargs=True))
    handles.append(model.register_forward_hook(_explain_failure(_has_several_dtypes(runtime)), always_call=True))
    for module in model.modules():
        if takes_hooks(module) and any(True for _ in reachable_parameters(module)):
            handles.append(module.register_state_dict_pre_hook(Hook(_before_saving(runtime))))
            handles.append(module.register_state_dict_post_hook(Hook(_name_only(runtime))))
            handles.append(module.register_load_state_dict_pre_hook(Hook(_before_loading(runtime))))
    return handles


def _of_unit(runtime: Runtime, function: Callable[..., None]) -> Callable[..., None]:
    whole = all(unit.rests_whole for unit in runtime.units)
    return registrable(WholeUnitHook(function, runtime.forward) if whole else OutsideHook(function))


def _of_pass(runtime: Runtime, number: int, function: Callable[..., None]) -> Callable[..., None]:
    return registrable(PassHook(function, runtime.forward, number))


def _noting(copies: CopiedGradients) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """Note the batches of training, outside of compiled code."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling() and not in_backward():
            copies.note_batch((args, kwargs))

    return hook


def _before_saving(runtime: Runtime) -> Callable[[nn.Module, str, bool], None]:
    """Let state_dict() see whole and current parameters; refuse it where it would save empty tensors."""
    cure = "use zeroshard.full_state_dict(model), or call it inside zeroshard.GatheredParameters(model.parameters())"

    def hook(module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        runtime.drain()
        if not runtime.names_in_state_dict:
            _refuse_hidden(runtime, module, "state_dict()", cure)

    return hook


def _name_only(runtime: Runtime) -> Callable[..., None]:
    """Put placeholders with names and shapes of parameters without values into state_dict(), where it is not refused.

    Nobody can save or load a placeholder by mistake. One of a weight in fp8 knows its parameter, for a library that
    copies a state dict in order to save it, on all ranks (`ShardedValue.coded`).
    """

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        for name, shape, parameter in _hidden_members(runtime, module) if runtime.names_in_state_dict else ():
            if f"{prefix}{name}" in state:
                coded = parameter if isinstance(parameter, CodedGuard) else None
                state[f"{prefix}{name}"] = sharded_value(state[f"{prefix}{name}"].dtype, shape, coded)

    return hook


def _hidden_members(runtime: Runtime, module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Name, whole shape and object of each parameter of a module that is sharded and empty now, or rests in fp8."""
    own = dict(reachable_parameters(module))
    names = {id(parameter): name for name, parameter in own.items()}
    for unit in runtime.units:
        for group in unit.groups:
            for parameter, segment in zip(group.parameters, group.plan.layout.segments, strict=True):
                hidden = isinstance(parameter, CodedGuard) or parameter.numel() == 0 != segment.numel
                if id(parameter) in names and hidden:
                    yield names[id(parameter)], segment.whole_shape, parameter


def _before_loading(runtime: Runtime) -> Callable[..., None]:
    """Let load_state_dict() write whole parameters while no operation runs; refuse it for empty ones."""
    cure = "load before shard(), or inside zeroshard.GatheredParameters(model.parameters(), modifier_rank=0)"

    def hook(module: nn.Module, *_: Any) -> None:
        runtime.drain()
        _refuse_hidden(runtime, module, "load_state_dict()", cure)

    return hook


def _refuse_hidden(runtime: Runtime, module: nn.Module, what: str, cure: str) -> None:
    for name, _, parameter in _hidden_members(runtime, module):
        path = next((path for path, member in runtime.model.named_modules() if member is module), "")
        why = "rests in fp8 and shows no values" if isinstance(parameter, CodedGuard) else "is sharded and empty here"
        raise UsageError(f"{what}: parameter {f'{path}.{name}'.lstrip('.')!r} {why}; {cure}")


def _entries(model: nn.Module, runtime: Runtime) -> list[nn.Module]:
    """The modules at which a forward of the model may begin: the model, and modules inside that hold all of its units.

    A wrapper that calls `inner.forward`, or a `generate` that calls the wrapped model, does not run the outer hooks.
    """
    needed = _root_members(runtime)
    names = [unit.plan.name for unit in runtime.units if unit.plan.name]
    found = [model]
    for path, module in model.named_modules():
        holds_units = names and all(name.startswith(f"{path}.") for name in names)
        if (
            path
            and takes_hooks(module)
            and holds_units
            and needed <= {id(parameter) for parameter in module.parameters()}
        ):
            found.append(module)
    return found


def _parts(model: nn.Module, runtime: Runtime) -> list[nn.Module]:
    """The other modules outside of units that read parameters of the root unit and may be called directly.

    For example, `generate` calls an encoder, and a custom loss calls the backbone, the head or the embedding.
    """
    needed, faces = _root_members(runtime), {id(entry) for entry in _entries(model, runtime)}
    names = {unit.plan.name for unit in runtime.units if unit.plan.name}
    found: dict[int, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if unit_of(path, names) not in ("", path):
            faces.add(id(module))
        elif any(id(parameter) in needed for parameter in (*module.parameters(), *external_parameters(module))):
            found[id(module)] = module
    return [module for key, module in found.items() if key not in faces and takes_hooks(module)]


def _root_members(runtime: Runtime) -> set[int]:
    root = next(unit for unit in runtime.units if unit.plan.name == "")
    return {id(parameter) for group in root.groups for parameter in group.parameters}


def _entering_model(forward: Forward, entry: int) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, _args: Any) -> None:
        if forward.inside == entry and not in_backward() and not is_nested_call(module):
            forward.forget_interrupted()
        forward.enter(entry)

    return hook


def _entering(enter: Callable[[int], None], number: int) -> Callable[[nn.Module, Any], None]:
    def hook(_module: nn.Module, _args: Any) -> None:
        enter(number)

    return hook


def _leaving(leave: Callable[..., None], number: int) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        # torch calls this while it handles the exception of a forward, too, with None for the output.
        leave(number, output, failed=output is None and sys.exc_info()[1] is not None)

    return hook


def _after(runtime: Runtime, index: int) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        runtime.forward.post_forward(index, output)

    return hook


def _explain_failure(several_dtypes: bool) -> Callable[[nn.Module, Any, Any], None]:
    """Add to torch's error about mismatched dtypes that some modules were kept in float32.

    torch calls the hook while it handles the exception of a forward, the only place where its message can be extended.
    """

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        error = sys.exc_info()[1]
        if output is not None or not isinstance(error, (RuntimeError, IndexError)) or "zeroshard" in str(error):
            return
        if several_dtypes and "dtype" in str(error) and not isinstance(error, ZeroShardError):
            error.args = (
                f"{error}\nzeroshard: some modules were kept in float32 beside others in lower precision "
                "(data_types.keep_in_fp32_modules in the config, keep_fp32 in the recipe, the model's own list, or "
                "frozen parameters of a class of their own, which are taken for packed ones and kept as they are). "
                "The model has to cast values that pass from one kind of module to the other. Cast in its forward, or "
                "keep no module in float32",
            )

    return hook


def _has_several_dtypes(runtime: Runtime) -> bool:
    dtypes = {group.plan.shown_dtype for unit in runtime.units for group in unit.groups}
    return sum(not is_packed(dtype) for dtype in dtypes) > 1


def _cast_inputs(
    dtype: torch.dtype, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(cast_value(value, dtype) for value in args), {
        key: cast_value(value, dtype) for key, value in kwargs.items()
    }


def cast_value(value: Any, dtype: torch.dtype) -> Any:
    """The value with its floating tensors in a dtype, those in lists, tuples and dicts too."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if type(value) in (list, tuple):
        return type(value)(cast_value(item, dtype) for item in value)
    if type(value) is dict:
        return {key: cast_value(item, dtype) for key, item in value.items()}
    return value


def _compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())

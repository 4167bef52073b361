"""Finds the units of a model: the parts that are gathered and reduced together.

Each outermost repeated block is a unit with everything inside it (experts included), so data-dependent branches inside
a block never change which collectives run. Large leaves outside the blocks (embedding, head) are units of their own,
since an embedding of 128k tokens is larger than several blocks; so are modules that the user marked as leaves (see
marks). All other parameters, and those that several units own or read, belong to the root unit, which stays gathered
for the whole pass.

Rejected: one unit per Linear (more and smaller collectives, and Python code per layer), and units by number of
parameters alone (their boundaries lie inside blocks, and change with the model's size).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zeroshard.arguments import need_kind
from zeroshard.errors import PlanError
from zeroshard.sharding.cut import Cut
from zeroshard.sharding.dtensors import cut_of
from zeroshard.sharding.kept import (
    KeptAsIs,
    buffers_of_codes,
    inner_tensors,
    is_composed,
    kept_parameters,
    scales_beside,
)
from zeroshard.sharding.marks import external_parameters, z3_leaf_module
from zeroshard.sharding.opaque import can_be_unit, is_opaque, takes_hooks
from zeroshard.sharding.resting import whole_class
from zeroshard.sharding.unowned import whole_numel, whole_shape

OWN_UNIT_NUMEL = 16_384
"""A leaf outside the blocks with at least this many elements is a unit of its own; so is an opaque module."""

LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers without a forward: they can't be units."""
CONTAINERS = (*LISTS, nn.Sequential)
_CONVERSIONS = ("to", "cpu", "cuda", "half", "bfloat16", "float", "type", "__torch_function__", "__torch_dispatch__")
"""A parameter class that defines one of these converts itself: its memory may hold something else than numbers."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter before layout, without its storage: plans can be made for models that are not built.

    Attributes:
        cut: how the model divides the parameter, `shape` being that of one rank's part; None if it does not.
        packed: its memory may hold something else than numbers of its dtype (a library's codes), and is kept unchanged.
        unknown_class: name of its class, if that does not show whether the memory holds such codes; else "".
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool = True
    cut: Cut | None = None
    packed: bool = False
    unknown_class: str = ""


@dataclass(frozen=True)
class UnitSpec:
    """A unit before layout: its name (module path, "" for the root) and the parameters that it owns.

    `aliases` are other names of the same parameters (tied weights), as (alias, name) pairs.
    """

    name: str
    parameters: tuple[ParameterSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()


def refuse_uninitialized(model: nn.Module) -> None:
    """Raises PlanError for a model that can't be planned: scripted, or with lazy parameters that have no shape yet.

    Also raises UsageError for what is no module.
    """
    need_kind(model, nn.Module, "the model", "an nn.Module")
    if not takes_hooks(model):
        raise PlanError(
            f"the model is a {type(model).__name__}: a scripted module takes no hooks, so nothing could gather "
            "its parameters. Put it into a module of its own (nn.Sequential(model)), or script what is inside the model"
        )
    for path, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(is_lazy(tensor) for tensor in own):
            raise PlanError(
                f"{path or 'the model'} ({type(module).__name__}) is lazy and has no parameters yet: run the model "
                "once on a batch before it is sharded, or name the sizes (nn.Linear instead of nn.LazyLinear)"
            )


def find_units(model: nn.Module, selected: Sequence[str] | None = None) -> list[UnitSpec]:
    """The units of `model` in module-tree order, the root first.

    Args:
        selected: module paths of the units, instead of the ones that are found; the rest belongs to the root unit.

    Raises:
        PlanError: a selected path does not exist, is repeated, lies inside another, or is a list of modules; or the
            model can't be planned, see `refuse_uninitialized`.
    """
    refuse_uninitialized(model)
    names = _check_selected(model, selected) if selected is not None else _find_names(model)
    known, owner = frozenset(names), dict[int, set[str]]()
    for path, module in model.named_modules(remove_duplicate=False):
        unit = unit_of(path, known)
        for parameter in (*module.parameters(recurse=False), *external_parameters(module)):
            owner.setdefault(id(parameter), set()).add(unit)
    _check_externals(model, owner)
    members: dict[str, list[ParameterSpec]] = {name: [] for name in ("", *names)}
    aliases: dict[str, list[tuple[str, str]]] = {name: [] for name in members}
    first_name: dict[int, tuple[str, str]] = {}
    kept = {id(parameter) for module in model.modules() for parameter in kept_parameters(module)}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        key = id(parameter)
        if key in first_name:
            name, unit = first_name[key]
            specs = zip(_specs_of(path, parameter, kept), _specs_of(name, parameter, kept), strict=True)
            aliases[unit] += [(other.name, first.name) for other, first in specs]
            continue
        unit = next(iter(owner[key])) if len(owner[key]) == 1 else ""
        first_name[key] = (path, unit)
        members[unit] += _specs_of(path, parameter, kept)
    for path, module in model.named_modules():
        for name, tensor in _no_parameters_yet(module):
            spec = ParameterSpec(f"{path}.{name}".lstrip("."), tuple(tensor.shape), tensor.dtype, False, packed=True)
            members[unit_of(path, known)].append(spec)
    return [
        UnitSpec(name, tuple(members[name]), tuple(aliases[name])) for name in members if name == "" or members[name]
    ]


def _specs_of(path: str, parameter: nn.Parameter, kept: Set[int]) -> list[ParameterSpec]:
    """The parameter; for a frozen one that is made of others, these, as `unpack` will name them.

    Args:
        kept: ids of parameters that no plan may cast.
    """
    if parameter.requires_grad or not is_composed(parameter):
        return [_spec_of(path, parameter, kept=id(parameter) in kept)]
    module, dot, name = path.rpartition(".")
    return [
        ParameterSpec(f"{module}{dot}{inner.name}", tuple(inner.tensor.shape), inner.tensor.dtype, False, packed=True)
        for inner in inner_tensors(name, parameter)
    ]


def _no_parameters_yet(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What `unpack` will make parameters of the module, though it belongs to none: buffers, and scales elsewhere."""
    yield from ((inner.name, inner.tensor) for inner in scales_beside(module))
    yield from buffers_of_codes(module).items()


def _spec_of(path: str, parameter: nn.Parameter, *, kept: bool) -> ParameterSpec:
    cut, trainable = cut_of(path, parameter), parameter.requires_grad
    # Libraries of quantized weights use a class of their own for parameters that a plain conversion would destroy.
    kind = whole_class(parameter)
    packed = cut is None and not trainable and (kept or kind is not nn.Parameter)
    known = kept or issubclass(kind, KeptAsIs) or _converts_itself(kind)
    unknown_class = kind.__name__ if packed and not known else ""
    return ParameterSpec(path, whole_shape(parameter), parameter.dtype, trainable, cut, packed, unknown_class)


def _converts_itself(kind: type[torch.Tensor]) -> bool:
    """Whether a class of parameters has conversions, or operations, of its own: its memory is no plain numbers."""
    own = kind.__mro__[: next(place for place, base in enumerate(kind.__mro__) if base in (nn.Parameter, torch.Tensor))]
    return any(name in vars(base) for base in own for name in _CONVERSIONS)


def _check_externals(model: nn.Module, owner: dict[int, set[str]]) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    if owner.keys() <= own:
        return
    for path, module in model.named_modules():
        if any(id(parameter) not in own for parameter in external_parameters(module)):
            raise PlanError(
                f"module {path or type(module).__name__!r} registered an external parameter that the model does not "
                "have; shard the model that holds both, or unregister it"
            )


def _find_names(model: nn.Module) -> tuple[str, ...]:
    return () if z3_leaf_module(model) or is_opaque(model) else tuple(_unit_paths(model, ""))


def _unit_paths(module: nn.Module, path: str) -> Iterator[str]:
    """Paths of the units below `module`, in registration order."""
    repeated = _repeated_children(module)
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if z3_leaf_module(child) and isinstance(child, LISTS):
            continue  # a list has no forward, so it is gathered with the module that holds it
        if can_be_unit(child) and (name in repeated or z3_leaf_module(child) or _is_large(child)):
            yield child_path
        elif not is_opaque(child):
            yield from _unit_paths(child, child_path)


def _repeated_children(module: nn.Module) -> frozenset[str]:
    """Children of a container that occur at least twice with the same class and hold parameters."""
    if not isinstance(module, CONTAINERS):
        return frozenset()
    children = [(name, child) for name, child in module.named_children() if _has_parameters(child)]
    counts = Counter(type(child) for _, child in children)
    return frozenset(name for name, child in children if counts[type(child)] >= 2 and not isinstance(child, LISTS))


def _has_parameters(module: nn.Module) -> bool:
    """Whether anything of the module is sharded."""
    if next(module.parameters(), None) is not None:
        return True
    return any(buffers_of_codes(part) for part in module.modules())


def _is_large(module: nn.Module) -> bool:
    """Whether a leaf, or an opaque module, is large enough for a unit of its own."""
    whole = is_opaque(module)
    if isinstance(module, LISTS) or (next(module.children(), None) is not None and not whole):
        return False
    numel = sum(whole_numel(parameter) for parameter in module.parameters(recurse=whole))
    return numel >= OWN_UNIT_NUMEL or bool(buffers_of_codes(module))


def unit_of(path: str, names: Set[str]) -> str:
    """The unit, of those with these names, that a module lies in or is; "" for the root."""
    while path and path not in names:
        path = path.rpartition(".")[0]
    return path


def _check_selected(model: nn.Module, selected: Sequence[str]) -> tuple[str, ...]:
    modules = dict(model.named_modules())
    for name in selected:
        if not name or name not in modules:
            raise PlanError(
                f"units: the model has no submodule {name!r}; name module paths as in model.named_modules()"
            )
        if isinstance(modules[name], LISTS):
            raise PlanError(
                f"units: {name!r} is a {type(modules[name]).__name__}, which has no forward to gather around; name the "
                "modules in it"
            )
        _check_reachable(name, modules)
        outer = [other for other in selected if other != name and name.startswith(other + ".")]
        if outer:
            raise PlanError(f"units: {name!r} lies inside the unit {outer[0]!r}; units can't be nested")
    if len(set(selected)) != len(selected):
        raise PlanError("units: a module path is named twice")
    return tuple(name for name in modules if name in set(selected))


def _check_reachable(name: str, modules: dict[str, nn.Module]) -> None:
    """Raises PlanError for a selected unit that may be used without a call of its own hooks."""
    if not can_be_unit(modules[name]):
        what = "takes no hooks" if not takes_hooks(modules[name]) else "may be used without being called"
        raise PlanError(
            f"units: {name!r} is a {type(modules[name]).__name__}, which {what}, so it can't be gathered by itself; "
            "name the module that holds it, or none: it is gathered with the unit around it"
        )
    parts = name.split(".")
    for around in (".".join(parts[:length]) for length in range(len(parts))):
        if is_opaque(modules[around]):
            where = repr(around) if around else "the model"
            raise PlanError(
                f"units: {name!r} lies inside {where}, a {type(modules[around]).__name__}, which may use parameters of "
                f"{name!r} without calling it; name {where if around else 'no unit inside'} instead"
            )

"""Marks that a user sets on modules before sharding: gather this one as a whole; this one reads that parameter.

Marks are in the `__dict__` of the modules, so that they are no parameters or buffers, and are read when units are
found. A registry beside the model was rejected: it would outlive models, and not contain copies of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from zeroshard.arguments import need_kind
from zeroshard.errors import UsageError

PARAMETER_OF = "_zeroshard_parameter_of"
"""Attribute of a sharded parameter: the engine's handle, unit and group, and its index there."""
_LEAF = "_zeroshard_leaf"
_EXTERNAL = "_zeroshard_external"


def external_parameters(module: nn.Module) -> Sequence[torch.Tensor]:
    """Parameters of other modules that the module's forward reads."""
    return tuple(module.__dict__.get(_EXTERNAL, ()))


def add_external(module: nn.Module, parameter: torch.Tensor) -> None:
    """Record that the module's forward reads the parameter."""
    if all(known is not parameter for known in external_parameters(module)):
        module.__dict__[_EXTERNAL] = [*external_parameters(module), parameter]


def remove_external(module: nn.Module, parameter: torch.Tensor) -> None:
    """Remove what `add_external` recorded. Raises UsageError if there is no such record."""
    kept = [known for known in external_parameters(module) if known is not parameter]
    if len(kept) == len(external_parameters(module)):
        raise UsageError(f"the parameter is not registered as external to this {type(module).__name__}")
    module.__dict__[_EXTERNAL] = kept


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module as a unit: it is gathered together with everything in it; `flag` False removes the mark.

    Call this before shard() or initialize(). A module inside a unit that is found anyway, such as a decoder block, is
    gathered with that unit and needs no mark.

    Raises:
        UsageError: the module is sharded already, or is no module.
    """
    need_kind(model, nn.Module, "leaf modules", "an nn.Module")
    if any(PARAMETER_OF in vars(parameter) for parameter in model.parameters()):
        raise UsageError(
            f"leaf modules: this {type(model).__name__} is sharded already, its units can't change; mark it before "
            "shard() or initialize()"
        )
    model.__dict__[_LEAF] = flag


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module was marked to be gathered as a whole."""
    need_kind(model, nn.Module, "leaf modules", "an nn.Module")
    return model.__dict__.get(_LEAF, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of a model."""
    need_kind(model, nn.Module, "leaf modules", "an nn.Module")
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of some classes: types, or class names, with or without their module path.

    Returns:
        The marked modules.

    Raises:
        UsageError: there is no module of a class.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks off all modules of some classes; as `set_z3_leaf_modules`."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their path in the model.

    Returns:
        The modules, and the names that no module has.

    Raises:
        UsageError: there are such names.
    """
    _check(model, module_names, str, "paths of modules, as a list,")
    modules = dict(model.named_modules())
    found = [modules[name] for name in module_names if name in modules]
    return _mark(found, [name for name in module_names if name not in modules], flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the end of their path: "mlp.experts" marks every `....mlp.experts`. As by name otherwise."""
    _check(model, module_name_suffixes, str, "ends of modules' paths, as a list,")
    found: list[nn.Module] = []
    missing: list[str] = []
    for suffix in module_name_suffixes:
        ending = [m for name, m in model.named_modules() if name == suffix or name.endswith(f".{suffix}")]
        found += ending
        missing += [] if ending else [suffix]
    return _mark(found, missing, flag, raise_if_not_found)


def _mark_classes(model: nn.Module, classes: Sequence[type | str], flag: bool, strict: bool) -> list[nn.Module]:
    _check(model, classes, (str, type), "classes or their names, as a list,")
    found: list[nn.Module] = []
    missing: list[str] = []
    for wanted in classes:
        members = [module for module in model.modules() if _is_of(module, wanted)]
        found += members
        missing += [] if members else [wanted if isinstance(wanted, str) else wanted.__qualname__]
    return _mark(found, missing, flag, strict)[0]


def _check(model: nn.Module, wanted: object, kind: type | tuple[type, ...], needed: str) -> None:
    """Raises UsageError for anything but a collection of `kind`; a single string, too, would be read by letters."""
    need_kind(model, nn.Module, "leaf modules", "an nn.Module")
    if isinstance(wanted, str) or not isinstance(wanted, Collection):
        need_kind(wanted, (), "leaf modules", needed)
    for item in wanted if isinstance(wanted, Collection) else ():
        need_kind(item, kind, "leaf modules", needed)


def _is_of(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    cls = type(module)
    return wanted in (cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}")


def _mark(found: list[nn.Module], missing: list[str], flag: bool, strict: bool) -> tuple[list[nn.Module], list[str]]:
    if missing and strict:
        raise UsageError(
            f"leaf modules: the model has no module {missing[0]!r}; name one that it has, or pass "
            "raise_if_not_found=False"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing

"""The parameters that a layer of a pipeline can reach: its own, and those that a function or lambda has captured.

    lambda x: F.linear(x, embedding.weight)      a variable around it, or a global that its code names
    partial(project, embedding), embedding.read  an argument, the object of a method
    LayerSpec(Head, embedding)                   an argument of a module that isn't built yet

On another stage than the module that it captured such a layer would use a copy that nobody trains. Of a captured module
only the attributes count that the code names, if it names some: `self` of a builder may hold all layers. Rejected: to
run the layers and see what they read, which needs an input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import nn

from zeroshard.pipeline.layers import LayerSpec, TiedLayerSpec

_DEPTH = 4
"""Containers, functions and partials within each other that are looked into."""
Named = Iterator[tuple[str, nn.Parameter]]


def reachable_parameters(layer: Any) -> Named:
    """Parameters of a layer, and of what it has captured, by name; one may come several times."""
    if isinstance(layer, TiedLayerSpec):  # its module is one on all stages, whatever it is built from
        yield from _within(layer.forward_fn, _DEPTH)
    elif isinstance(layer, LayerSpec):
        yield from _within([*layer.module_args, *layer.module_kwargs.values(), layer.typename], _DEPTH)
    else:
        yield from _within(layer, _DEPTH)


def _within(value: Any, depth: int) -> Named:
    if isinstance(value, nn.Module):
        yield from value.named_parameters()
    elif isinstance(value, nn.Parameter):
        yield "a parameter", value
    elif not depth:
        return
    elif isinstance(value, MethodType):
        yield from _of_function(cast("FunctionType", value.__func__), [value.__self__], depth - 1)
    elif isinstance(value, FunctionType):
        yield from _of_function(value, [], depth - 1)
    else:
        for inner in _inside(value):
            yield from _within(inner, depth - 1)


def _inside(value: Any) -> Iterable[Any]:
    """What a container or a partial call holds."""
    if isinstance(value, (list, tuple, set)):
        return cast("Iterable[Any]", value)
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value).values()
    return (value.func, value.args, value.keywords) if isinstance(value, partial) else ()


def _of_function(function: FunctionType, captured: list[Any], depth: int) -> Named:
    names = _names_in(function.__code__)
    captured += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            captured.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
    # Of globals modules and parameters alone: a function that it calls may be any of a library.
    globals_ = (function.__globals__.get(name) for name in names)
    for value in (*captured, *(value for value in globals_ if isinstance(value, (nn.Module, nn.Parameter)))):
        if isinstance(value, nn.Module):
            yield from _of_module(value, names, depth)
        else:
            yield from _within(value, depth)


def _of_module(module: nn.Module, names: set[str], depth: int) -> Named:
    """What a function reads of a module: the attributes that it names, or, where it names none, all by calling it."""
    named = sorted(name for name in names if name in dir(module))
    for name in named:
        value = getattr(module, name)
        if isinstance(value, nn.Parameter):
            yield name, value
        elif not (isinstance(value, MethodType) and value.__self__ is module and name in vars(nn.Module)):
            yield from _within(value, depth)
        else:
            yield from module.named_parameters()
    if not named:
        yield from module.named_parameters()


def _names_in(code: CodeType) -> set[str]:
    """Names of globals and attributes in a function's code, and in those that it defines."""
    inner = (names for const in code.co_consts if isinstance(const, CodeType) for names in _names_in(const))
    return {*code.co_names}.union(*inner)

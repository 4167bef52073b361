"""Chooses the linear layers of a model that compute in fp8, and converts them in place.

A layer can be converted if it computes like `nn.Linear` and its sizes suit products in fp8 (multiples of 16, or of 128
for scales by block). Of these layers, those named in `Fp8.names` are converted; without names, or with "auto" among
them, the layers in repeated blocks that are large enough to become faster (see `speedup`). Layers outside of the blocks
have to be named, since rounding harms the first and the last layer most and fused losses read the head's weight without
calling it, and so do layers with tied weights. A named layer with a tied weight, such as a head that is the embedding,
casts it in each forward: the embedding reads the same weight in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeGuard

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.errors import PlanError
from zeroshard.fp8.linear import Fp8Linear, LastInput, own_weight
from zeroshard.fp8.recipe import AUTO, Fp8, Products, Scaling
from zeroshard.fp8.speedup import AROUND_SECONDS, HOST_SECONDS, STEP_SECONDS, seconds_in_bf16, speedup
from zeroshard.sharding.dtensors import as_dtensor
from zeroshard.sharding.opaque import is_opaque

LEAST_SPEEDUP = 1.0
"""The least speedup over bf16 with which a layer is converted."""


@dataclass(frozen=True)
class Choice:
    """The choice for a linear layer.

    Attributes:
        name: module path.
        sizes: out_features and in_features.
        taken: whether it computes in fp8.
        why: the reason, in words.
    """

    name: str
    sizes: tuple[int, int]
    taken: bool
    why: str


def choose(model: nn.Module, wanted: Fp8, kept: Sequence[str] = (), *, converted: bool = True) -> list[Choice]:
    """Choose for each plain linear layer of `model`.

    Args:
        kept: dotted parts of names of parameters that stay in float32.
        converted: the others get the compute dtype; else each weight keeps its own.

    Raises:
        PlanError: no layer has a wanted name, or no layer with that name can compute in fp8.
    """
    linears = {path: module for path, module in model.named_modules() if _is_linear(module)}
    whole = [f"{path}." for path, module in model.named_modules() if is_opaque(module)]
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    repeated = _in_blocks(model)
    names = [name for name in wanted.names or () if name != AUTO]
    chosen = wanted.names is None or AUTO in wanted.names
    found: list[Choice] = []
    for path, linear in linears.items():
        sizes, tied = (linear.out_features, linear.in_features), uses[id(own_weight(linear))] > 1
        named = any(_part(path, name) for name in names)
        problem = _problem(path, linear, kept, wanted.scaling, converted=converted)
        if any(path.startswith(around) for around in whole):
            problem = "the module around it reads its weight"
        elif problem is None and tied and not named:
            problem = "its weight is tied to another"
        if problem is not None:
            found.append(Choice(path, sizes, False, problem))
        elif named or not chosen:
            why = (
                f"named{', and cast in each forward, for its weight is tied' if tied else ''}" if named else "not named"
            )
            found.append(Choice(path, sizes, named, why))
        else:
            found.append(_by_speedup(path, sizes, wanted, inside=not repeated or path in repeated))
    if why := _bound_by_host(found, sum(not repeated or path in repeated for path in linears), wanted.tokens):
        found = [
            choice if any(_part(choice.name, name) for name in names) else _without_gain(choice, why)
            for choice in found
        ]
    for name in names:
        _check_name(name, [choice for choice in found if _part(choice.name, name)])
    return found


def _check_name(name: str, choices: Sequence[Choice]) -> None:
    """Raises PlanError unless some layer of the name is converted, and the one whose path it is."""
    if not choices:
        raise PlanError(f"fp8: the model has no nn.Linear {name!r}; name module paths, or parts such as 'mlp'")
    exact = [choice for choice in choices if choice.name == name] or choices
    if not any(choice.taken for choice in exact):
        path, why = exact[0].name, exact[0].why
        raise PlanError(f"fp8: layer {path!r} can't compute in fp8: {why}; take it out of the filter")


def described(choices: Sequence[Choice]) -> list[str]:
    """The choices in words, one line per kind of layer: sizes, number of layers, and reason."""
    counts = Counter((choice.taken, choice.sizes, choice.why) for choice in choices)
    return [
        f"fp8: {number} linear layers of {sizes[0]} x {sizes[1]} {'take part' if taken else 'stay'} ({why})"
        for (taken, sizes, why), number in counts.items()
    ]


def products_of(wanted: Fp8, choices: Sequence[Choice]) -> Products | None:
    """The choices as a plan has them; None if no layer computes in fp8."""
    layers = tuple(choice.name for choice in choices if choice.taken)
    return Products(wanted.scaling, layers, wanted.shards) if layers else None


def convert(model: nn.Module, products: Products) -> None:
    """Convert the layers of a plan to fp8. Raises PlanError for one that is no plain linear layer."""
    last, resting = LastInput(products.scaling is Scaling.BLOCKWISE), products.resting_weights
    for path in products.layers:
        linear = model.get_submodule(path)
        if not _is_linear(linear):
            raise PlanError(f"policy.products: layer {path!r} is a {type(linear).__name__}, and no plain nn.Linear")
        if not isinstance(linear, Fp8Linear):
            linear.__class__ = _in_fp8(type(linear))
        assert isinstance(linear, Fp8Linear)
        linear.scaling, linear.last_input, linear.kept = products.scaling, last, None
        linear.rests = f"{path}.weight" in resting


def restore(model: nn.Module) -> None:
    """Convert layers in fp8 back to plain linear layers."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            del module.scaling, module.last_input, module.kept, module.rests
            module.__class__ = type(module).before  # pyright: ignore[reportAttributeAccessIssue]


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer computes like nn.Linear; its class may initialize it differently."""
    return isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, Fp8Linear.forward)


@cache
def _in_fp8(kind: type[nn.Linear]) -> type[nn.Linear]:
    """The class of a layer of class `kind` that computes in fp8."""
    return type(kind.__name__, (Fp8Linear, kind), {"__module__": __name__, "before": kind})


def _problem(path: str, linear: nn.Linear, kept: Sequence[str], scaling: Scaling, *, converted: bool) -> str | None:
    """Why a layer can't compute in fp8; None if it can."""
    if linear.in_features % scaling.multiple or linear.out_features % scaling.multiple:
        return f"its sizes {linear.out_features} x {linear.in_features} are no multiples of {scaling.multiple}"
    if any(_part(f"{path}.weight", name) for name in kept):
        return "its weight stays in float32"
    weight = own_weight(linear)
    if weight is None:
        return None
    if as_dtensor(weight) is not None:
        return "its weight is divided by the model"
    if is_traceable_wrapper_subclass(weight):
        return f"its weight is a {type(weight).__name__}, whose products are its own"
    if not converted and weight.dtype not in (torch.bfloat16, torch.float16):
        return f"its weight is in {str(weight.dtype).removeprefix('torch.')}"
    return None


def _by_speedup(path: str, sizes: tuple[int, int], wanted: Fp8, *, inside: bool) -> Choice:
    if not inside:
        return Choice(path, sizes, False, "outside of the repeated blocks")
    times, seconds = speedup(*sizes, wanted.tokens), seconds_in_bf16(*sizes, wanted.tokens)
    why = f"{times:.2f}x of bf16 with {wanted.tokens} rows"
    if times >= LEAST_SPEEDUP and seconds < HOST_SECONDS:
        least = HOST_SECONDS * 1e3
        return Choice(path, sizes, False, f"{why}, but {seconds * 1e3:.2f} of {least:.2f} ms that fp8 takes the host")
    return Choice(path, sizes, times >= LEAST_SPEEDUP, why)


def _bound_by_host(choices: Sequence[Choice], layers: int, tokens: int) -> str | None:
    """Why a model waits for its host, and not for the layers that were chosen; None if it waits for these.

    Args:
        layers: linear layers of all blocks, chosen or not: each of them takes host time.
    """
    seconds = sum(seconds_in_bf16(*choice.sizes, tokens) for choice in choices if choice.taken)
    if seconds < STEP_SECONDS:
        least = f"{STEP_SECONDS * 1e3:.0f} ms of a step"
        return f"all such layers together take less than {least}, which the host takes anyway"
    if seconds < layers * AROUND_SECONDS:
        return (
            f"all such layers together take {seconds * 1e3:.1f} ms of a step, and the host takes about "
            f"{layers * AROUND_SECONDS * 1e3:.1f} ms for the {layers} layers of the blocks and what lies around them"
        )
    return None


def _without_gain(choice: Choice, why: str) -> Choice:
    """The choice for a layer that was not named, where the model waits for its host."""
    return replace(choice, taken=False, why=f"{choice.why}, but {why}") if choice.taken else choice


def _part(path: str, name: str) -> bool:
    return f".{name}." in f".{path}."


def _in_blocks(model: nn.Module) -> frozenset[str]:
    """Paths of all modules within lists that have at least two modules of one class."""
    found: set[str] = set()
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        counts = Counter(type(child) for child in module)
        for name, child in module.named_children():
            if counts[type(child)] >= 2:
                below = f"{path}.{name}" if path else name
                found.update(f"{below}.{inner}" if inner else below for inner, _ in child.named_modules())
    return frozenset(found)

"""Refuses a model in which two tensors share memory: sharded, each has memory of its own, and their values diverge.

    memory     |---- embedding.weight ----|       |--- a ---|--- b ---|
               |------ head.weight -------|       slices of one flat buffer, side by side
                       refused                            accepted

Plain torch updates two Parameter objects over one memory twice per step, each with its own optimizer state; one
parameter with two names (`head.weight = embedding.weight`) is updated once. Treating the first as the second would give
other numbers than torch, so the user has to choose.

Overlaps are found exactly: address ranges are compared in one sweep over sorted addresses, and the elements only where
two ranges overlap (the columns of a matrix have overlapping ranges, but share no element).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.errors import PlanError

AddressSpace = tuple[str, int]
"""Where addresses can be compared: a device, and on the meta device a storage."""
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Where a module keeps its parameters, buffers, modules and hooks."""
_DEPTH = 3
"""How deeply nested lists and dicts are searched for tensors."""


@dataclass(frozen=True)
class Span:
    """The bytes of a strided tensor: `width` bytes at `start` plus each combination of multiples of the strides.

    Attributes:
        dims: (size, stride in bytes) of each dim, the largest stride first.
    """

    start: int
    dims: tuple[tuple[int, int], ...]
    width: int

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.start + sum((size - 1) * stride for size, stride in self.dims) + self.width

    def at(self, index: int) -> Span:
        """One slice along the outermost dim."""
        return Span(self.start + index * self.dims[0][1], self.dims[1:], self.width)

    def slices_between(self, low: int, high: int) -> range:
        """The slices along the outermost dim whose address ranges overlap [low, high)."""
        size, stride = self.dims[0]
        reach = self.at(0).end - self.start
        first = max(0, (low - self.start - reach) // stride + 1)
        return range(first, min(size, -(-(high - self.start) // stride)))


@dataclass(frozen=True)
class Member:
    """A tensor of the model: a parameter, or something else that may share memory with one."""

    name: str
    kind: str
    span: Span
    trainable: bool

    @property
    def is_parameter(self) -> bool:
        return self.kind == "parameter"


def refuse_shared_memory(model: nn.Module) -> None:
    """Raises PlanError where a parameter shares memory with another parameter, a buffer or a tensor attribute.

    Attributes are tensors and NumPy arrays, also in lists and dicts. One object under several names is accepted (tied
    weights). Frozen parameters may share memory with each other and with other tensors: their values don't change.
    """
    places: dict[AddressSpace, list[Member]] = {}
    for place, member in _members(model):
        places.setdefault(place, []).append(member)
    for members in places.values():
        pair = _first_overlap(members)
        if pair is not None:
            raise PlanError(_refusal(*pair))


def kept_tensors(model: nn.Module) -> Iterator[Member]:
    """Buffers, and tensors and arrays among the attributes of modules, that are no parameters themselves."""
    for _, member in _other_tensors(model, {id(parameter) for parameter in model.parameters()}):
        yield member


def share_bytes(one: Span, other: Span) -> bool:
    """Whether any byte belongs to both."""
    if one.end <= other.start or other.end <= one.start:
        return False
    if not one.dims and not other.dims:
        return True
    if one.dims and other.dims and one.dims[0][1] == other.dims[0][1]:
        return _share_bytes_of_equal_strides(one, other)
    # The one with the larger outermost stride is cut into slices, of which few overlap the other.
    if not one.dims or (other.dims and other.dims[0][1] > one.dims[0][1]):
        one, other = other, one
    return any(share_bytes(one.at(index), other) for index in one.slices_between(other.start, other.end))


def span_of(start: int, sizes: tuple[int, ...], strides: tuple[int, ...], width: int) -> Span:
    """The bytes of a tensor without zero-size dims; strides in bytes. Contiguous dims are joined to one."""
    dims: list[tuple[int, int]] = []
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True)):
        if size == 1 or stride == 0:
            continue
        reach = dims[-1][0] * dims[-1][1] if dims else width
        if stride == reach and dims:
            dims[-1] = dims[-1][0] * size, dims[-1][1]
        elif stride == reach:
            width *= size
        else:
            dims.append((size, stride))
    return Span(start, tuple(reversed(dims)), width)


def _share_bytes_of_equal_strides(one: Span, other: Span) -> bool:
    """As `share_bytes`, for equal outermost strides: whether slices i and j overlap depends on j - i alone."""
    (one_size, stride), (other_size, _) = one.dims[0], other.dims[0]
    first, second = one.at(0), other.at(0)
    # Slice i of one against slice j of the other is slice 0 of one against slice j - i, which may be before the first.
    dims = ((one_size + other_size - 1, stride), *second.dims)
    shifted = Span(second.start - (one_size - 1) * stride, dims, second.width)
    return any(share_bytes(first, shifted.at(index)) for index in shifted.slices_between(first.start, first.end))


def _members(model: nn.Module) -> Iterator[tuple[AddressSpace, Member]]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            yield from _member(name, "parameter", parameter, seen)
    yield from _other_tensors(model, seen)


def _other_tensors(model: nn.Module, seen: set[int]) -> Iterator[tuple[AddressSpace, Member]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            yield from _member(name, "buffer", buffer, seen)
        prefix = f"{path}." if path else ""
        for name, value in _attributes(module):
            if isinstance(value, torch.Tensor):
                yield from _member(f"{prefix}{name}", "attribute", value, seen)
            else:
                yield from _array(f"{prefix}{name}", value)


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | np.ndarray[Any, Any]]]:
    """Tensors and arrays that are ordinary attributes of a module, or in lists and dicts among these.

    Without a module's own tables of parameters and buffers, and what torch's hooks recompute before each forward.
    """
    renewed = {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, (SpectralNorm, WeightNorm))}
    for name, value in vars(module).items():
        if name not in renewed and name not in _OWN_ATTRIBUTES:
            yield from _tensors_in(name, value, _DEPTH)


def _tensors_in(name: str, value: object, depth: int) -> Iterator[tuple[str, torch.Tensor | np.ndarray[Any, Any]]]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield name, value
    elif depth and type(value) in (list, tuple, deque):
        for index, item in enumerate(cast("Iterable[object]", value)):
            yield from _tensors_in(f"{name}[{index}]", item, depth - 1)
    elif depth and isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            yield from _tensors_in(f"{name}[{key!r}]", item, depth - 1)


def _array(name: str, array: np.ndarray[Any, Any]) -> Iterator[tuple[AddressSpace, Member]]:
    """A NumPy array as an attribute; `parameter.detach().numpy()` shares the parameter's memory."""
    if array.size == 0 or array.dtype.hasobject:
        return
    start: int = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        start += min(0, stride) * (size - 1)  # a flipped array begins at its end
    strides = tuple(abs(stride) for stride in array.strides)
    yield ("cpu", 0), Member(name, "attribute", span_of(start, array.shape, strides, array.itemsize), False)


def _member(name: str, kind: str, tensor: torch.Tensor, seen: set[int]) -> Iterator[tuple[AddressSpace, Member]]:
    """The tensor as a Member; nothing for tensors in `seen`, without elements, or without strided memory."""
    if id(tensor) in seen:
        return
    seen.add(id(tensor))
    if tensor.layout is not torch.strided or tensor.numel() == 0 or is_traceable_wrapper_subclass(tensor):
        return
    width = tensor.element_size()
    strides = tuple(stride * width for stride in tensor.stride())
    if tensor.is_meta:  # no memory yet; tensors that share a storage will share memory
        place, start = ("meta", tensor.untyped_storage()._cdata), int(tensor.storage_offset()) * width
    else:
        place, start = (tensor.device.type, tensor.device.index or 0), tensor.data_ptr()
    trainable = kind == "parameter" and tensor.requires_grad
    yield place, Member(name, kind, span_of(start, tuple(tensor.shape), strides, width), trainable)


def _first_overlap(members: list[Member]) -> tuple[Member, Member] | None:
    """The first two tensors that share memory of which one is trainable, by a sweep over sorted addresses."""
    open_now: list[Member] = []
    for member in sorted(members, key=lambda each: each.span.start):
        open_now = [other for other in open_now if other.span.end > member.span.start]
        for other in open_now:
            trains = member.trainable or other.trainable
            if trains and share_bytes(other.span, member.span):
                return (other, member) if other.is_parameter else (member, other)
        open_now.append(member)
    return None


def _refusal(parameter: Member, other: Member) -> str:
    if other.is_parameter:
        return (
            f"{parameter.name!r} and {other.name!r} are two parameters over the same memory. Sharded, each would have "
            "memory of its own, and their values would diverge. To train them as one, let both names hold one "
            f"Parameter object ({other.name} = {parameter.name}); to train them separately, give one a copy "
            f"({other.name} = nn.Parameter({other.name}.detach().clone())), before the optimizer is made"
        )
    what = "buffer" if other.kind == "buffer" else "tensor attribute"
    return (
        f"{what} {other.name!r} shares memory with parameter {parameter.name!r}. Sharded, the parameter gets other "
        f"memory, and {other.name!r} would keep the values that it has now. Read the parameter itself where you read "
        f"{other.name!r}, or, if it is meant to keep its values, make it a copy (.detach().clone())"
    )

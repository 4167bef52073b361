"""Inert values, which replace the classes, functions and calls of a pickle.

A pickle names classes and functions, and calls them. Here a name becomes a `Name`, and a call an `Inert` that keeps its
arguments. `Inert` compares by identity, so it may be a key; nothing of it is ever called.

A few names are known (`collections.OrderedDict`, `torch.Size`, dtypes and storages); `KNOWN` builds their values, and
nothing else is run. Names that only an attack would use raise an error: they would do no harm here, but the owner of
the file should know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zeroshard.errors import CheckpointError

# All names are harmless here; these are refused so that attacks are noticed.
_SUSPICIOUS_TEXT = (
    "os posix nt sys subprocess importlib runpy socket shutil ctypes pty code codeop pickle marshal commands "
    "webbrowser timeit pdb bdb asyncio multiprocessing threading signal io tempfile urllib http requests ssl "
    "smtplib inspect gc atexit site pip imp pydoc platform concurrent"
)
_SUSPICIOUS = frozenset(_SUSPICIOUS_TEXT.split())
_PLAIN_BUILTINS_TEXT = (
    "set frozenset list tuple dict bytes bytearray int float bool complex str slice range object getattr"
)
_PLAIN_BUILTINS = frozenset(_PLAIN_BUILTINS_TEXT.split())
_STORAGES: dict[str, torch.dtype] = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


@dataclass(frozen=True)
class Name:
    """A class or function that a pickle mentions."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Inert:
    """Stands for the object that a pickle makes by calling `of` with `args`, then setting state, items and entries."""

    of: Name
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    entries: list[tuple[Any, Any]] = field(default_factory=list)

    def attribute(self, key: str, default: Any = None) -> Any:
        """A field of the object's `__dict__`, if the pickle has it as a plain dict."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


@dataclass(frozen=True)
class StorageType:
    """The class of a storage: the dtype of its elements."""

    dtype: torch.dtype


Builder = Callable[[tuple[Any, ...]], Any]


def resolve(module: str, name: str) -> Any:
    """The value of a global name: a dtype, a storage type, or a `Name`.

    Raises:
        CheckpointError: no checkpoint needs the name.
    """
    root = module.partition(".")[0]
    if module in ("torch", "torch.storage") and name in _STORAGES:
        return StorageType(_STORAGES[name])
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    found = Name(module, name)
    builtin = root in ("builtins", "__builtin__")
    if root in _SUSPICIOUS or (builtin and name not in _PLAIN_BUILTINS):
        raise CheckpointError(
            f"the pickle names {found}, which no checkpoint needs: it was made to run code. Nothing was run; refused"
        )
    return found


def _ordered_dict(args: tuple[Any, ...]) -> Any:
    if not args:
        return {}
    if len(args) == 1 and isinstance(args[0], list) and all(isinstance(pair, (tuple, list)) for pair in args[0]):
        return {check_key(key): value for key, value in args[0]}
    raise CheckpointError("an OrderedDict that is not made of pairs; refused")


def _set(args: tuple[Any, ...]) -> Any:
    if len(args) != 1 or not isinstance(args[0], (list, tuple)):
        raise CheckpointError("a set that is not made of a list; refused")
    return {check_key(value) for value in args[0]}


def _size(args: tuple[Any, ...]) -> Any:
    if len(args) != 1 or not isinstance(args[0], (list, tuple)):
        raise CheckpointError("a torch.Size that is no list of numbers; refused")
    return shape_of(args[0])


def _encode(args: tuple[Any, ...]) -> Any:
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
        raise CheckpointError("bytes in another form than Python's pickle writes; refused")
    return args[0].encode("latin-1", errors="strict")


def _drop_copy(args: tuple[Any, ...]) -> Any:
    return args[0] if args else None


# All that a pickle can run, besides the builders of tensors that `torchzip` adds for files of torch.
KNOWN: dict[str, Builder] = {
    "collections.OrderedDict": _ordered_dict,
    "builtins.set": _set,
    "__builtin__.set": _set,
    "builtins.dict": _ordered_dict,
    "torch.Size": _size,
    "_codecs.encode": _encode,
    "torch._utils._rebuild_parameter": _drop_copy,
}
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
MAX_DIMS = 32
_KEY_LIMIT = 1 << 64


def shape_of(value: Any) -> tuple[int, ...]:
    """A tensor's shape or strides, checked to be a short list of plain numbers. Raises CheckpointError."""
    sizes = tuple(value) if isinstance(value, (list, tuple)) and len(value) <= MAX_DIMS else None
    if sizes is None or not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        raise CheckpointError("a tensor's shape or stride is no list of sensible numbers; refused")
    return sizes


def check_key(key: Any) -> Any:
    """The key of a dict or set, if hashing it is cheap and keys can't be made to collide. Raises CheckpointError."""
    parts = key if type(key) is tuple and len(key) <= 8 else (key,)
    for part in parts:
        plain = part is None or isinstance(part, (str, bytes, float, bool, Name, Inert, torch.dtype))
        if not plain and not (type(part) is int and abs(part) < _KEY_LIMIT):
            raise CheckpointError(f"a key of type {type(part).__name__} in a dict of the pickle; refused")
    return key

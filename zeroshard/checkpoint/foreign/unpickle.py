"""Read a pickle without running it.

A pickle is a program for a stack machine. `pickletools` decodes its operations; the machine here executes them with
inert values only: no name is imported, nothing found in the file is called, no attribute is set. What is left is memory
and time, so both are bounded: operations, containers, nesting, and the size that the result has when everything that is
shared is written out (a few bytes can share their way to billions of values that only a reader meets).

Rejected: `pickle.Unpickler` with `find_class` overridden. It calls what `find_class` returns and sets what BUILD says,
and one number in a PUT operation makes it allocate gigabytes.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.checkpoint.foreign.inert import KNOWN, Builder, Inert, Name, check_key, resolve
from zeroshard.errors import CheckpointError

PersistentLoad = Callable[[Any], Any]
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS_TEXT = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"
)
_LITERALS = frozenset(_LITERALS_TEXT.split())


@dataclass(frozen=True)
class Limits:
    """What a pickle may use. The defaults hold metadata of a few million tensors."""

    pickle_bytes: int = 1 << 29
    operations: int = 60_000_000
    containers: int = 12_000_000
    nesting: int = 64
    values: int = 100_000_000


def unpickle(
    data: bytes,
    where: str,
    persistent_load: PersistentLoad | None = None,
    builders: Mapping[str, Builder] | None = None,
    limits: Limits | None = None,
) -> Any:
    """The value of a pickle, of plain containers, numbers, text and `Inert`s.

    Args:
        where: the file, for messages.
        persistent_load: makes a value of a persistent id (torch's storages); None refuses them.
        builders: what known names make, besides those of `inert.KNOWN`.

    Raises:
        CheckpointError: it is damaged, too large, or built to do harm; nothing was run.
    """
    limits = limits or Limits()
    if len(data) > limits.pickle_bytes:
        raise CheckpointError(
            f"{where}: its pickle has {len(data)} bytes, more than the limit of {limits.pickle_bytes}"
        )
    machine = _Machine(persistent_load, {**KNOWN, **(builders or {})}, limits)
    try:
        value = machine.run(data)
        check_tree(value, limits)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, UnicodeError) as error:
        raise CheckpointError(f"{where} is damaged, or no pickle: {error}") from error
    return value


class _Machine:
    """The stack machine; one method per kind of operation."""

    def __init__(self, persistent_load: PersistentLoad | None, builders: Mapping[str, Builder], limits: Limits) -> None:
        self.persistent_load = persistent_load
        self.builders = builders
        self.limits = limits
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.containers = 0
        self.copied = 0
        self.actions: dict[str, Callable[[Any], None]] = self._actions()

    def run(self, data: bytes) -> Any:
        for done, (opcode, argument, position) in enumerate(pickletools.genops(io.BytesIO(data))):
            if done > self.limits.operations:
                raise CheckpointError(f"the pickle has more than {self.limits.operations} operations; refused")
            name = opcode.name
            if name in _LITERALS:
                self.stack.append(argument)
            elif name == "STOP":
                break
            else:
                action = self.actions.get(name)
                if action is None:
                    raise CheckpointError(f"operation {name} at byte {position}, which no checkpoint uses; refused")
                action(argument)
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            raise CheckpointError("the pickle does not end with one value; refused")
        return self.stack[0]

    def _actions(self) -> dict[str, Callable[[Any], None]]:
        push = self.stack.append
        get = self._get
        return {
            **{name: lambda _, value=value: push(value) for name, value in _CONSTANTS.items()},
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": lambda _: push(_MARK),
            "POP": lambda _: self._drop(self._pop()),
            "POP_MARK": lambda _: self._drop(self._to_mark()),
            "DUP": lambda _: push(self.stack[-1]),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda index: push(get(index))),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self._put),
            "MEMOIZE": lambda _: self._put(len(self.memo)),
            "EMPTY_LIST": lambda _: push(self._container([])),
            "EMPTY_TUPLE": lambda _: push(()),
            "EMPTY_DICT": lambda _: push(self._container({})),
            "EMPTY_SET": lambda _: push(self._container(set())),
            "LIST": lambda _: push(self._container(self._to_mark())),
            "TUPLE": lambda _: push(self._container(tuple(self._to_mark()))),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "DICT": lambda _: self._dict(),
            "FROZENSET": lambda _: push(self._container(frozenset(map(check_key, self._to_mark())))),
            "APPEND": lambda _: self._extend([self._pop()]),
            "APPENDS": lambda _: self._extend(self._to_mark()),
            "SETITEM": lambda _: self._update([self._pop(), self._pop()][::-1]),
            "SETITEMS": lambda _: self._update(self._to_mark()),
            "ADDITEMS": lambda _: self._add(self._to_mark()),
            "GLOBAL": lambda text: push(resolve(*text.split(" ", 1))),
            "STACK_GLOBAL": lambda _: self._stack_global(),
            "REDUCE": lambda _: self._reduce(),
            "NEWOBJ": lambda _: self._reduce(),
            "NEWOBJ_EX": lambda _: self._new_with_keywords(),
            "BUILD": lambda _: self._build(),
            "BINPERSID": lambda _: self._persistent(),
        }

    def _container(self, value: Any) -> Any:
        self.containers += 1
        if self.containers > self.limits.containers:
            raise CheckpointError(f"the pickle makes more than {self.limits.containers} containers; refused")
        return value

    def _drop(self, value: Any) -> None:
        """Nothing is done with `value`."""

    def _pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise CheckpointError("the pickle takes a value where there is none; refused")
        return value

    def _to_mark(self) -> list[Any]:
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index] is _MARK:
                values = self.stack[index + 1 :]
                del self.stack[index:]
                return values
        raise CheckpointError("the pickle takes values back to a mark that it did not set; refused")

    def _get(self, index: int) -> Any:
        if index not in self.memo:
            raise CheckpointError(f"the pickle recalls value {index}, which it never stored; refused")
        return self.memo[index]

    def _put(self, index: int) -> None:
        if index < 0 or not self.stack or self.stack[-1] is _MARK:
            raise CheckpointError("the pickle stores a value where there is none; refused")
        self.memo[index] = self.stack[-1]

    def _tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self.stack.append(self._container(tuple(reversed(values))))

    def _dict(self) -> None:
        values = self._to_mark()
        self.stack.append(self._container({}))
        self._update(values)

    def _extend(self, values: list[Any]) -> None:
        target = self._target()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Inert):
            target.items.extend(values)
        else:
            raise CheckpointError(f"the pickle appends to a {type(target).__name__}; refused")

    def _update(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise CheckpointError("the pickle sets a key without a value; refused")
        target = self._target()
        pairs = zip(values[::2], values[1::2], strict=True)
        if isinstance(target, dict):
            for key, value in pairs:
                target[check_key(key)] = value
        elif isinstance(target, Inert):
            target.entries.extend(pairs)
        else:
            raise CheckpointError(f"the pickle sets keys of a {type(target).__name__}; refused")

    def _add(self, values: list[Any]) -> None:
        target = self._target()
        if not isinstance(target, set):
            raise CheckpointError(f"the pickle adds members to a {type(target).__name__}; refused")
        target.update(map(check_key, values))

    def _target(self) -> Any:
        if not self.stack:
            raise CheckpointError("the pickle changes a value where there is none; refused")
        return self.stack[-1]

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise CheckpointError("the pickle computes a name to import; refused")
        self.stack.append(resolve(module, name))

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(function, Name) or not isinstance(args, tuple):
            raise CheckpointError("the pickle calls something that it has made itself; refused")
        builder = self.builders.get(str(function))
        if builder is None:
            self.stack.append(self._container(Inert(function, args)))
            return
        # What builders copy is paid for, or one long text could be copied a million times.
        self.copied += sum(len(part) for part in args if isinstance(part, (str, bytes, list, tuple)))
        if self.copied > self.limits.pickle_bytes:
            raise CheckpointError("the pickle copies the same data over and over; refused")
        self.stack.append(self._container(builder(args)))

    def _new_with_keywords(self) -> None:
        keywords, args, cls = self._pop(), self._pop(), self._pop()
        if not isinstance(cls, Name) or not isinstance(args, tuple) or not isinstance(keywords, dict):
            raise CheckpointError("the pickle calls something that it has made itself; refused")
        self.stack.append(self._container(Inert(cls, args, state=dict(keywords))))

    def _build(self) -> None:
        state, target = self._pop(), self._target()
        if isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, dict) or state:  # an OrderedDict with attributes of its own (state_dict metadata)
            attributes = state if isinstance(state, dict) else {}
            if not isinstance(target, dict) or set(attributes) - {"_metadata"}:
                raise CheckpointError(f"the pickle sets attributes of a {type(target).__name__}; refused")

    def _persistent(self) -> None:
        if self.persistent_load is None:
            raise CheckpointError("the pickle refers to data outside of itself; refused")
        self.stack.append(self.persistent_load(self._pop()))


def check_tree(value: Any, limits: Limits) -> None:
    """Refuse a value that is nested too deeply, contains itself, or is huge when its shared parts are written out.

    Raises:
        CheckpointError: it is one of these.
    """
    sizes: dict[int, tuple[int, int]] = {}  # of a container: nesting, values
    entered: set[int] = set()
    stack = [value]
    while stack:
        node = stack[-1]
        children = _children(node)
        if children is None or id(node) in sizes:
            stack.pop()
            continue
        if id(node) not in entered:
            entered.add(id(node))
            for child in children:
                if _children(child) is not None and id(child) not in sizes:
                    if id(child) in entered:
                        raise CheckpointError("the pickle holds a container that contains itself; refused")
                    stack.append(child)
            continue
        stack.pop()
        below = [sizes[id(child)] for child in children if id(child) in sizes]
        nesting = 1 + max((nested for nested, _ in below), default=0)
        total = 1 + len(children) + sum(count for _, count in below)
        if nesting > limits.nesting:
            raise CheckpointError(f"the pickle is nested deeper than {limits.nesting} levels; refused")
        if total > limits.values:
            raise CheckpointError(f"written out, the pickle holds more than {limits.values} values; refused")
        sizes[id(node)] = (nesting, total)


def _children(node: Any) -> list[Any] | None:
    """What a container holds; None if it is none."""
    if isinstance(node, dict):
        return [*node.values(), *(key for key in node if isinstance(key, (tuple, Inert)))]
    if isinstance(node, (list, tuple, set, frozenset)):
        return list(node)
    if isinstance(node, Inert):
        flat = [part for pair in node.entries for part in pair]
        return [*node.args, node.state, *node.items, *flat]
    return None

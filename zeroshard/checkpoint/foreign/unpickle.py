"""Reads a pickle without running it.

A pickle is a program for a stack machine. This machine executes it with inert values only: it imports no name, calls
nothing that the file names, and sets no attribute. Memory and time are bounded by limits: operations, containers,
nesting, and the number of values of the result with shared parts counted each time (a few bytes can refer to shared
parts so often that a reader meets billions of values).

Rejected: `pickle.Unpickler` with its own `find_class`. It calls what `find_class` returns, sets attributes by BUILD,
and one number in a PUT operation makes it allocate gigabytes. Rejected: `pickletools.genops`, which takes ten times as
long; metadata of large jobs has some ten million operations.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.checkpoint.foreign.inert import KNOWN, Builder, Inert, Name, check_key, resolve
from zeroshard.errors import CheckpointError

PersistentLoad = Callable[[Any], Any]
_INT = struct.Struct("<i")
_UINT = struct.Struct("<I")
_USHORT = struct.Struct("<H")
_ULONG = struct.Struct("<Q")
_FLOAT = struct.Struct(">d")
_MAX_DIGITS = 400


@dataclass(frozen=True)
class Limits:
    """Bounds for a pickle. The defaults suit metadata of about a million parts of tensors."""

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
    """The value of a pickle, made of plain containers, numbers, text and `Inert` values.

    Args:
        where: the file, for messages.
        persistent_load: makes the value of a persistent id (torch's storages); None refuses such ids.
        builders: make the values of known calls, besides `inert.KNOWN`.
        limits: bounds; None for the defaults.

    Raises:
        CheckpointError: it is damaged, too large, or malicious; nothing was run.
    """
    limits = limits or Limits()
    if len(data) > limits.pickle_bytes:
        raise CheckpointError(f"{where}: its pickle has {len(data)} bytes, more than {limits.pickle_bytes}")
    machine = _Machine(data, persistent_load, {**KNOWN, **(builders or {})}, limits)
    try:
        value = machine.run()
        check_tree(value, limits)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{where} is damaged, or no pickle: {error}") from error
    return value


class _Machine:
    """The stack machine. `_table` has a function for each operation; `_at` is the position of the next byte."""

    def __init__(
        self, data: bytes, persistent_load: PersistentLoad | None, builders: Mapping[str, Builder], limits: Limits
    ) -> None:
        self._data = data
        self._at = 0
        self._persistent_load = persistent_load
        self._builders = builders
        self._limits = limits
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._containers = 0
        self._copied = 0

    def run(self) -> Any:
        data, table = self._data, self._table()
        for _ in range(self._limits.operations):
            if self._at >= len(data):
                raise CheckpointError("the pickle is damaged: it ends without its end")
            code = data[self._at]
            self._at += 1
            if code == 0x2E:  # STOP
                break
            action = table.get(code)
            if action is None:
                raise CheckpointError(
                    f"operation {bytes([code])!r} at byte {self._at - 1}, which no checkpoint uses; refused"
                )
            action()
        else:
            raise CheckpointError(f"the pickle has more than {self._limits.operations} operations; refused")
        if len(self._stack) != 1 or self._marks:
            raise CheckpointError("the pickle does not end with one value; refused")
        return self._stack[0]

    def _table(self) -> dict[int, Callable[[], None]]:
        push = self._stack.append
        take, pop, memoize = self._take, self._pop, self._memoize
        data = self._data

        def byte() -> int:
            value = data[self._at]
            self._at += 1
            return value

        actions: dict[bytes, Callable[[], Any]] = {
            # plain values
            b"N": lambda: push(None),
            b"\x88": lambda: push(True),
            b"\x89": lambda: push(False),
            b"K": lambda: push(byte()),
            b"M": lambda: push(self._number(_USHORT)),
            b"J": lambda: push(self._number(_INT)),
            b"G": lambda: push(self._number(_FLOAT)),
            b"I": lambda: push(_integer(self._line())),
            b"L": lambda: push(_integer(self._line().removesuffix(b"L"))),
            b"F": lambda: push(float(self._line()[:_MAX_DIGITS])),
            b"\x8a": lambda: push(int.from_bytes(take(byte()), "little", signed=True)),
            b"\x8b": lambda: push(int.from_bytes(take(self._number(_UINT)), "little", signed=True)),
            b"V": lambda: push(self._line().decode("raw-unicode-escape")),
            b"X": lambda: push(_text(take(self._number(_UINT)))),
            b"\x8c": lambda: push(_text(take(byte()))),
            b"\x8d": lambda: push(_text(take(self._number(_ULONG)))),
            b"U": lambda: push(take(byte()).decode("latin-1")),
            b"T": lambda: push(take(self._number(_UINT)).decode("latin-1")),
            b"C": lambda: push(take(byte())),
            b"B": lambda: push(take(self._number(_UINT))),
            b"\x8e": lambda: push(take(self._number(_ULONG))),
            b"\x96": lambda: push(take(self._number(_ULONG))),
            # the stack and the memo
            b"\x80": lambda: byte(),
            b"\x95": lambda: self._number(_ULONG),
            b"(": lambda: self._marks.append(len(self._stack)),
            b"0": lambda: pop(),
            b"1": lambda: self._to_mark(),
            b"2": lambda: push(self._top()),
            b"g": lambda: push(self._recall(_integer(self._line()))),
            b"h": lambda: push(self._recall(byte())),
            b"j": lambda: push(self._recall(self._number(_UINT))),
            b"p": lambda: memoize(_integer(self._line())),
            b"q": lambda: memoize(byte()),
            b"r": lambda: memoize(self._number(_UINT)),
            b"\x94": lambda: memoize(len(self._memo)),
            # containers
            b"]": lambda: push(self._container([])),
            b")": lambda: push(()),
            b"}": lambda: push(self._container({})),
            b"\x8f": lambda: push(self._container(set())),
            b"l": lambda: push(self._container(self._to_mark())),
            b"t": lambda: push(self._container(tuple(self._to_mark()))),
            b"\x85": lambda: push(self._container((pop(),))),
            b"\x86": lambda: self._tuple(2),
            b"\x87": lambda: self._tuple(3),
            b"d": self._dict,
            b"\x91": lambda: push(self._container(frozenset(map(check_key, self._to_mark())))),
            b"a": lambda: self._extend([pop()]),
            b"e": lambda: self._extend(self._to_mark()),
            b"s": lambda: self._update([pop(), pop()][::-1]),
            b"u": lambda: self._update(self._to_mark()),
            b"\x90": lambda: self._add(self._to_mark()),
            # what Python would import, call and set
            b"c": lambda: push(resolve(_text(self._line()), _text(self._line()))),
            b"\x93": self._stack_global,
            b"R": self._reduce,
            b"\x81": self._reduce,
            b"\x92": self._new_with_keywords,
            b"b": self._build,
            b"Q": self._persistent,
        }
        return {code[0]: action for code, action in actions.items()}

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise CheckpointError("the pickle is damaged: a value is longer than the file")
        part = self._data[self._at : end]
        self._at = end
        return part

    def _number(self, kind: struct.Struct) -> Any:
        value = kind.unpack_from(self._data, self._at)[0]
        self._at += kind.size
        return value

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise CheckpointError("the pickle is damaged: a line has no end")
        line = self._data[self._at : end]
        self._at = end + 1
        return line

    def _container(self, value: Any) -> Any:
        self._containers += 1
        if self._containers > self._limits.containers:
            raise CheckpointError(f"the pickle makes more than {self._limits.containers} containers; refused")
        return value

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise CheckpointError("the pickle takes a value where there is none; refused")
        return self._stack.pop()

    def _top(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise CheckpointError("the pickle uses a value where there is none; refused")
        return self._stack[-1]

    def _to_mark(self) -> list[Any]:
        if not self._marks:
            raise CheckpointError("the pickle takes values back to a mark that it did not set; refused")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _recall(self, index: int) -> Any:
        if index not in self._memo:
            raise CheckpointError(f"the pickle recalls value {index}, which it never stored; refused")
        return self._memo[index]

    def _memoize(self, index: int) -> None:
        self._memo[index] = self._top()

    def _tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._stack.append(self._container(tuple(reversed(values))))

    def _dict(self) -> None:
        values = self._to_mark()
        self._stack.append(self._container({}))
        self._update(values)

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Inert):
            target.items.extend(values)
        else:
            raise CheckpointError(f"the pickle appends to a {type(target).__name__}; refused")

    def _update(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise CheckpointError("the pickle sets a key without a value; refused")
        target = self._top()
        pairs = zip(values[::2], values[1::2], strict=True)
        if isinstance(target, dict):
            for key, value in pairs:
                target[check_key(key)] = value
        elif isinstance(target, Inert):
            target.entries.extend(pairs)
        else:
            raise CheckpointError(f"the pickle sets keys of a {type(target).__name__}; refused")

    def _add(self, values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, set):
            raise CheckpointError(f"the pickle adds members to a {type(target).__name__}; refused")
        target.update(map(check_key, values))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise CheckpointError("the pickle computes a name to import; refused")
        self._stack.append(resolve(module, name))

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(function, Name) or not isinstance(args, tuple):
            raise CheckpointError("the pickle calls something that it has made itself; refused")
        builder = self._builders.get(str(function))
        if builder is None:
            self._stack.append(self._container(Inert(function, args)))
            return
        # Bytes that builders copy are counted, since one long text could be copied a million times.
        self._copied += sum(len(part) for part in args if isinstance(part, (str, bytes, list, tuple)))
        if self._copied > self._limits.pickle_bytes:
            raise CheckpointError("the pickle copies the same data over and over; refused")
        self._stack.append(self._container(builder(args)))

    def _new_with_keywords(self) -> None:
        keywords, args, cls = self._pop(), self._pop(), self._pop()
        if not isinstance(cls, Name) or not isinstance(args, tuple) or not isinstance(keywords, dict):
            raise CheckpointError("the pickle calls something that it has made itself; refused")
        self._stack.append(self._container(Inert(cls, args, state=dict(keywords))))

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, dict) or state:  # an OrderedDict with attributes of its own (state_dict metadata)
            attributes = state if isinstance(state, dict) else {}
            if not isinstance(target, dict) or set(attributes) - {"_metadata"}:
                raise CheckpointError(f"the pickle sets attributes of a {type(target).__name__}; refused")

    def _persistent(self) -> None:
        if self._persistent_load is None:
            raise CheckpointError("the pickle refers to data outside of itself; refused")
        self._stack.append(self._persistent_load(self._pop()))


def _integer(line: bytes) -> int | bool:
    """A number in digits, which must be few. Protocol 0 writes booleans as `00` and `01`."""
    if line in (b"00", b"01"):
        return line == b"01"
    if len(line) > _MAX_DIGITS:
        raise CheckpointError(f"a number of {len(line)} digits; refused")
    return int(line)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


_CONTAINERS = (dict, list, tuple, set, frozenset, Inert)


def check_tree(value: Any, limits: Limits) -> None:
    """Check a value, with shared parts counted each time.

    Raises:
        CheckpointError: it is nested too deeply, contains itself, or has too many values.
    """
    if not isinstance(value, _CONTAINERS):
        return
    done: dict[int, tuple[int, int]] = {}  # of a container: nesting, values
    frames = [_Frame(value)]
    entered = {id(value)}
    while frames:
        frame = frames[-1]
        for child in frame.children:
            known = done.get(id(child))
            if known is None:
                if id(child) in entered:
                    raise CheckpointError("the pickle holds a container that contains itself; refused")
                entered.add(id(child))
                frames.append(_Frame(child))
                break
            frame.add(*known)
        else:
            frames.pop()
            found = (1 + frame.nesting, frame.values)
            if found[0] > limits.nesting:
                raise CheckpointError(f"the pickle is nested deeper than {limits.nesting} levels; refused")
            if found[1] > limits.values:
                raise CheckpointError(f"written out, the pickle holds more than {limits.values} values; refused")
            done[frame.identity] = found
            if frames:
                frames[-1].add(*found)


class _Frame:
    """A container whose children are being checked."""

    __slots__ = ("children", "identity", "nesting", "values")

    def __init__(self, node: Any) -> None:
        parts = _parts(node)
        self.identity = id(node)
        self.children = iter([part for part in parts if isinstance(part, _CONTAINERS)])
        self.nesting = 0
        self.values = 1 + len(parts)

    def add(self, nesting: int, values: int) -> None:
        if nesting > self.nesting:
            self.nesting = nesting
        self.values += values


def _parts(node: Any) -> list[Any]:
    """All values in a container."""
    if isinstance(node, dict):
        return [*node.values(), *node]
    if isinstance(node, Inert):
        flat = [part for pair in node.entries for part in pair]
        return [*node.args, node.state, *node.items, *flat]
    return list(node)

"""Record what a constructor does to its tensors on a tape, instead of doing it.

    user code        torch.empty(4, 4)     w.normal_()          x.item()            torch.rand(3, device="other")
    function mode    device=meta           |                    |                   |
    dispatch mode    op [0], meta w        op [1]: the numbers  x is replayed now:  a real tensor: runs as it is,
                                           are drawn into       a real number back  not recorded
                                           scratch

Tensors on the device of the tape (the default) become meta tensors whose values the tape can make at any time; where
Python reads a value, the tape is replayed immediately. Tensors on another device stay real.

Random numbers are drawn twice: once while recording, into scratch memory that is dropped, and again when the values are
made. So the generator has, at every line, the state that an ordinary build would give it: `manual_seed`, `fork_rng`,
real random tensors and a second model all come out the same. Advancing the generator only when the model is sharded
was rejected: two models built one after the other would start from the same numbers and be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from zeroshard.errors import UsageError
from zeroshard.sharding.deferred.calls import CallWatcher
from zeroshard.sharding.deferred.replay import Replay, generator_state
from zeroshard.sharding.deferred.tape import Constant, GeneratorState, Placeholder, Tape, TapeOp, TensorRef, mark_of

_aten = torch.ops.aten

# In-place operations that don't read the old values of their target. `out=` arguments are of the same kind.
_OVERWRITES = frozenset(
    {"fill_", "zero_", "copy_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_"}
    | {"log_normal_", "_foreach_zero_", "_foreach_copy_"}
)

# A real tensor that a recorded operation reads is copied up to this size; a larger one (a checkpoint's) is referenced.
_COPIED_BYTES = 1 << 20

_REMEDY = (
    "Build this model without zeroshard.Init, or leave this part out of its constructor and do it after sharding"
    " under zeroshard.GatheredParameters."
)


class Recorder(TorchDispatchMode):
    """Records operations on deferred tensors on `tape`; all other operations run as without it."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.replay = Replay(tape)
        self.calls = CallWatcher(tape, self.evaluate)
        self.paused = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # so that `tensor.device` is not changed by CallWatcher in here
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.paused or self.calls.paused:
            return func(*args, **kwargs)
        if func is _aten.empty.memory_format and self.calls.depth == 0 and "device" in kwargs:
            kwargs["device"] = torch.device("meta")  # `torch.Tensor(3, 4)`, which no device context sees
        deferred = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        device = kwargs.get("device")
        to_meta = device is not None and torch.device(device).type == "meta"
        if not to_meta and (not deferred or (device is not None and _uses_only_shape(func))):
            return func(*args, **kwargs)
        if _returns_python_value(func):
            return func(*tree_map(self._evaluated, args), **kwargs)
        return self._record(func, args, kwargs)

    def evaluate(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a deferred tensor as of now, on the device of the tape."""
        self.paused = True
        try:
            return self._evaluated(tensor)
        finally:
            self.paused = False

    def _evaluated(self, leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.is_meta):
            return leaf
        number = self._number_with_value(leaf, "reading it")
        return TensorRef.of(leaf, number).view(Replay(self.tape).values(frozenset({number}))[number])

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._infer(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            return result  # `t_()`, `resize_()` change the tensor object, not its bytes
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        written = list(_written(func, args, kwargs))
        outputs = list(tree_flatten(result)[0])
        known = {id(tensor.untyped_storage()) for tensor in tensors}
        fresh = [isinstance(out, torch.Tensor) and id(out.untyped_storage()) not in known for out in outputs]
        if not written and not any(fresh):
            return result  # a view shares the storage and needs no entry
        inputs, kept, changed = self._effects(func, tensors, written)
        refs = tuple(
            TensorRef.of(out, self._number(out)) if new else None for out, new in zip(outputs, fresh, strict=True)
        )
        changed |= {ref.storage for ref in refs if ref is not None}
        generator = kwargs.get("generator")
        op = TapeOp(
            func,
            tree_map(self._freeze, args),
            self._freeze_kwargs(kwargs),
            refs,
            frozenset(inputs),
            frozenset(inputs | kept),
            frozenset(changed),
            self._generator_state(generator) if torch.Tag.nondeterministic_seeded in func.tags else None,
            torch.get_default_dtype(),
        )
        if op.rng is not None:
            self.replay.advance_generator(op, generator)
        self.tape.append(op)
        return result

    def _infer(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation on the meta device, real operands replaced by their shapes."""

        def shape_of(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
            return None if isinstance(leaf, torch.Generator) else leaf

        if any(not target.is_meta for target in _written(func, args, kwargs)):
            raise UsageError(f"{func} would write a deferred value into a real tensor under zeroshard.Init. {_REMEDY}")
        options = {name: shape_of(leaf) if name != "device" else leaf for name, leaf in kwargs.items()}
        if options.get("device") is not None:
            options["device"] = torch.device("meta")
        if options.get("pin_memory"):
            options["pin_memory"] = False
        try:
            return func(*tree_map(shape_of, args), **tree_map(shape_of, options))
        except NotImplementedError as error:
            if torch.Tag.nondeterministic_seeded in func.tags or any(True for _ in _written(func, args, kwargs)):
                raise UsageError(
                    f"{func} can't be deferred by zeroshard.Init: torch has no rule for it on the meta device."
                    f" {_REMEDY}"
                ) from error
        # No rule, or a shape that depends on values (`nonzero`, a boolean mask): learn the shape by running it.
        real = func(
            *tree_map(self._evaluated, args), **{**tree_map(self._evaluated, kwargs), **self._real_device(kwargs)}
        )
        return tree_map(shape_of, real)

    def _real_device(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {} if kwargs.get("device") is None else {"device": self.tape.device}

    def _effects(
        self, func: OpOverload, tensors: list[torch.Tensor], written: list[torch.Tensor]
    ) -> tuple[set[int], set[int], set[int]]:
        """The storages that an operation computes from, those that it overwrites in part, and all that it writes."""
        overwrites = func.overloadpacket.__name__ in _OVERWRITES or any(arg.is_out for arg in func._schema.arguments)
        inputs: set[int] = set()
        kept: set[int] = set()
        changed: set[int] = set()
        targets = {id(target) for target in written}
        for target in written:
            if overwrites and _covers_storage(target):
                changed.add(self._number(target))
            else:
                number = self._number_with_value(target, f"{func} writes a part of it")
                changed.add(number)
                (kept if overwrites else inputs).add(number)
        if not _uses_only_shape(func):
            operands = [tensor for tensor in tensors if tensor.is_meta and id(tensor) not in targets]
            inputs |= {self._number_with_value(operand, f"{func} reads it") for operand in operands}
        return inputs, kept, changed

    def _number(self, tensor: torch.Tensor) -> int:
        number = self.tape.number_of(tensor)
        return self.tape.add_storage(tensor) if number is None else number

    def _number_with_value(self, tensor: torch.Tensor, why: str) -> int:
        number = self.tape.number_of(tensor)
        if number is None and tensor.untyped_storage().nbytes() == 0:
            return self.tape.add_storage(tensor)
        if number is None:
            origin = "outside of zeroshard.Init" if mark_of(tensor) is None else "by an earlier zeroshard.Init"
            raise UsageError(
                f"a meta tensor of shape {tuple(tensor.shape)} was made {origin} and has no value here ({why})."
                " Build both parts of the model inside one `with zeroshard.Init():`."
            )
        return number

    def _freeze(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return Placeholder.GENERATOR
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_meta:
            return TensorRef.of(leaf, self._number(leaf))
        size = leaf.numel() * leaf.element_size()
        constant = leaf.detach().clone() if size <= _COPIED_BYTES else leaf
        return Constant(constant, constant._version)

    def _freeze_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        frozen = {name: tree_map(self._freeze, value) for name, value in kwargs.items() if name != "device"}
        if kwargs.get("device") is not None:
            frozen["device"] = Placeholder.DEVICE
        if frozen.get("pin_memory"):
            frozen["pin_memory"] = False
        return frozen

    def _generator_state(self, generator: torch.Generator | None) -> GeneratorState:
        if generator is not None:
            return GeneratorState(generator.device, generator.get_state(), private=True)
        return GeneratorState(self.tape.device, generator_state(self.tape.device), private=False)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    """The tensors that an operation changes, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor))


def _returns_python_value(func: OpOverload) -> bool:
    """Whether an operation returns Python numbers: `item`, `equal`, `allclose`, a truth value."""
    returns = func._schema.returns
    return len(returns) > 0 and not any("Tensor" in str(value.type) for value in returns)


def _uses_only_shape(func: OpOverload) -> bool:
    """Whether an operation uses only the shape and dtype of its tensor argument: `zeros_like`, `new_empty`."""
    name = func.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")


def _covers_storage(tensor: torch.Tensor) -> bool:
    """Whether every byte of the storage belongs to exactly one element of `tensor`."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()

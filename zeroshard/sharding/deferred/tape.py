"""The tape of a deferred build: which ATen operations wrote which storage, and from which random state.

    storages   0: embed.weight   1: fc.weight   2: (scratch)            a storage is a number, its bytes don't exist
    ops        [0] empty -> 0   [1] normal_ 0   [2] empty -> 1   [3] rand -> 2   [4] copy_ 1 <- 2
    writers    0: [0, 1]        1: [2, 4]       2: [3]

Values belong to storages, not to tensor objects: `p.data`, views, `detach`, `nn.Parameter(t)` and tied weights all
share one, so views need no entry, and `p.data = q` moves `p` to the storage of `q`. The mark (tape, number) is in the
`__dict__` of the storage. The tape itself references no storage, so it is freed with the last deferred tensor, and no
table outside of it is needed. Marks on parameters were rejected: `copy.deepcopy` (every `nn.TransformerEncoder`) makes
parameters without any registration.

Each random operation keeps the generator state that it started from (5 kB on a CPU, 16 bytes on a GPU). So the tape can
be evaluated in any order: one tensor, or one rank's shard, is made without the rest.
"""

from __future__ import annotations

import enum
import hashlib
import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten

_MARK = "_zeroshard_tape"


class Placeholder(enum.Enum):
    """An argument that a replay fills in."""

    DEVICE = "the device that the tape is for"
    GENERATOR = "a generator in the recorded state"


class Mark(NamedTuple):
    """The tape of a storage, and the storage's number there."""

    tape: Tape
    storage: int


def mark_of(tensor: torch.Tensor) -> Mark | None:
    """The mark of the storage behind `tensor`, if a tape made it."""
    with torch._C.DisableTorchFunction():  # CallWatcher would answer False to `is_meta`
        return vars(tensor.untyped_storage()).get(_MARK) if tensor.is_meta else None


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view (sizes, strides and offset in elements) of a numbered storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> TensorRef:
        return cls(
            storage,
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """This view over real bytes."""
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        view.set_(storage, self.offset, self.size, self.stride)  # pyright: ignore[reportCallIssue, reportArgumentType]
        if self.conj:
            view = torch.conj(view)
        return torch._neg_view(view) if self.neg else view

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether a freshly made tensor has this geometry."""
        return (self.size, self.stride, self.offset, self.conj, self.neg) == (
            tuple(tensor.size()),
            tuple(tensor.stride()),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )


@dataclass(frozen=True, slots=True)
class Constant:
    """A real tensor that a recorded operation reads. Large ones are not copied; `version` shows if they changed."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """The state of a generator before an operation; `private` if the caller passed a generator."""

    device: torch.device
    state: torch.Tensor
    private: bool


@dataclass(frozen=True, slots=True)
class TapeOp:
    """One operation on numbered storages.

    `inputs` are the storages whose values it computes from, `reads` those and the ones it writes only in part,
    `writes` all that it changes or makes.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef | None, ...]
    inputs: frozenset[int]
    reads: frozenset[int]
    writes: frozenset[int]
    rng: GeneratorState | None
    default_dtype: torch.dtype

    def refs(self) -> Iterable[TensorRef]:
        """The storages that the arguments name."""
        return (leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, TensorRef))


@dataclass(eq=False)
class Tape:
    """Operations in program order; none is added after its `Init` has closed.

    Attributes:
        started: nanoseconds of the monotonic clock when the tape was made.
        nbytes: bytes of each storage, by its number.
        writers: of each storage, the positions in `ops` of the operations that write it.
    """

    device: torch.device
    started: int = field(default_factory=time.monotonic_ns)
    ops: list[TapeOp] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    writers: list[list[int]] = field(default_factory=list)

    def add_storage(self, tensor: torch.Tensor) -> int:
        """Number the storage behind a meta tensor. A mark of an earlier tape is replaced by this one."""
        storage = tensor.untyped_storage()
        number = len(self.nbytes)
        vars(storage)[_MARK] = Mark(self, number)
        self.nbytes.append(storage.nbytes())
        self.writers.append([])
        return number

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage behind `tensor` on this tape; also updates its size after a `resize_`."""
        mark = mark_of(tensor)
        if mark is None or mark.tape is not self:
            return None
        self.nbytes[mark.storage] = max(self.nbytes[mark.storage], tensor.untyped_storage().nbytes())
        return mark.storage

    def append(self, op: TapeOp) -> None:
        for storage in op.writes:
            self.writers[storage].append(len(self.ops))
        self.ops.append(op)

    def history(self, storages: Iterable[int]) -> list[int]:
        """The operations, in program order, that the values of `storages` depend on.

        An operation whose result is overwritten as a whole is left out, a random one too: every random operation
        starts from its recorded generator state.
        """
        needed: set[int] = set()
        todo = [(storage, len(self.ops)) for storage in storages]
        while todo:
            storage, end = todo.pop()
            writers = self.writers[storage]
            last = bisect_left(writers, end) - 1
            if last < 0 or writers[last] in needed:
                continue
            needed.add(writers[last])
            # An operation that writes a part reads the storage too, so all earlier writers are found one by one.
            todo.extend((read, writers[last]) for read in self.ops[writers[last]].reads)
        return sorted(needed)

    def fingerprint(self) -> str:
        """A digest of the operations and of the random states; it differs between ranks that built other models."""
        digest = hashlib.sha256(str(self.device.type).encode())
        for op in self.ops:
            digest.update(f"{op.func}{list(op.refs())}{op.outputs}".encode())
            if op.rng is not None:
                digest.update(op.rng.state.numpy().tobytes())
        return digest.hexdigest()

"""Run parts of a tape on the real device and return the values that result.

One call makes the requested storages from nothing. It runs only the operations on which their values depend, in
program order, and frees each scratch storage after its last reader. It counts the bytes that are alive.

Replaying the whole tape in program order was rejected: `model.to(torch.bfloat16)` or a residual scaling at the end of
a constructor would then keep the whole fp32 model alive until its last line. The price is that a scratch tensor which
several parameters read (the layer that `nn.TransformerEncoder` copies) is computed once for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from zeroshard.errors import UsageError
from zeroshard.sharding.deferred.tape import Constant, GeneratorState, Placeholder, Tape, TapeOp, TensorRef


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the default generator of `device`: a byte tensor on the host."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device.type).get_rng_state(device)


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Put the default generator of `device` back to `state`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)


@contextmanager
def restoring_globals(device: torch.device) -> Iterator[None]:
    """Restore the default generator of `device`, the default dtype and the grad mode at the end; grad is off inside."""
    state, dtype = generator_state(device), torch.get_default_dtype()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        set_generator_state(device, state)


class Replay:
    """Evaluates a tape on its device. `live_bytes` and `peak_bytes` count the storages that it holds."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.live_bytes = 0
        self.peak_bytes = 0
        self._scratch = torch.UntypedStorage(0, device=tape.device)

    def values(self, storages: frozenset[int]) -> dict[int, torch.UntypedStorage]:
        """The bytes of `storages` as the operations recorded so far leave them, by number.

        The caller owns them and drops them with `free`.
        """
        steps = self.tape.history(storages)
        last_use: dict[int, int] = {}
        for index in steps:
            op = self.tape.ops[index]
            for storage in (*op.writes, *(ref.storage for ref in op.refs())):
                last_use[storage] = index
        made: dict[int, torch.UntypedStorage] = {}
        with restoring_globals(self.tape.device):
            for index in steps:
                op = self.tape.ops[index]
                self.step(op, made)
                used = {*op.writes, *(ref.storage for ref in op.refs())}
                self.free(made, [s for s in used if last_use[s] == index and s not in storages])
            for storage in storages - made.keys():  # made by `torch.empty` and never written: any bytes will do
                self._allocate(made, storage)
        return made

    def advance_generator(self, op: TapeOp, generator: torch.Generator | None) -> None:
        """Run a random operation only to advance the real generator from its present state; the numbers are dropped.

        All such operations share one scratch buffer. With a buffer for each, small allocations took parts of the
        memory that was freed, so the next buffer did not fit there: the process grew to the size of the model.
        """
        made = self.values(op.inputs)
        targets = op.writes - op.inputs - {ref.storage for ref in op.outputs if ref is not None}
        if targets:
            made[min(targets)] = self._scratch_with(self.tape.nbytes[min(targets)])
        with torch.no_grad():
            self._call(op, made, generator)
        if targets:
            del made[min(targets)]
        self.free(made, list(made))

    def free_scratch(self) -> None:
        """Free the scratch buffer; no operation is recorded after this."""
        # Modes and hooks reference each other: without this the buffer, as large as the largest parameter, would stay
        # until Python collects cycles.
        self._scratch = torch.UntypedStorage(0, device=self.tape.device)

    def step(self, op: TapeOp, made: dict[int, torch.UntypedStorage]) -> None:
        """Run one operation from its recorded generator state; `made` gains what it makes."""
        generator = self._restore(op.rng) if op.rng is not None else None
        results = tree_flatten(self._call(op, made, generator))[0]
        for ref, value in zip(op.outputs, results, strict=True):
            if ref is None or ref.storage in made:
                continue
            nbytes = self.tape.nbytes[ref.storage]
            if ref.matches(value) and value.untyped_storage().nbytes() == nbytes:
                self._add(made, ref.storage, value.untyped_storage())
            else:  # the real kernel chose other strides than the meta kernel, which later views were made with
                self._allocate(made, ref.storage)
                ref.view(made[ref.storage]).copy_(value)

    def free(self, made: dict[int, torch.UntypedStorage], storages: list[int]) -> None:
        """Drop storages from `made`."""
        for storage in storages:
            if storage in made:
                self.live_bytes -= made.pop(storage).nbytes()

    def _call(self, op: TapeOp, made: dict[int, torch.UntypedStorage], generator: torch.Generator | None) -> Any:
        def fill(leaf: Any) -> Any:
            if isinstance(leaf, TensorRef):
                if leaf.storage not in made:
                    self._allocate(made, leaf.storage)
                return leaf.view(made[leaf.storage])
            if isinstance(leaf, Constant):
                if leaf.tensor._version != leaf.version:
                    raise UsageError(
                        f"a real tensor of shape {tuple(leaf.tensor.shape)} that was read under zeroshard.Init"
                        f" ({op.func}) was changed afterwards, before the model was sharded. Change a copy of it."
                    )
                return leaf.tensor
            if leaf is Placeholder.DEVICE:
                return self.tape.device
            return generator if leaf is Placeholder.GENERATOR else leaf

        args, kwargs = tree_map(fill, (op.args, op.kwargs))
        torch.set_default_dtype(op.default_dtype)
        return op.func(*args, **kwargs)

    def _scratch_with(self, nbytes: int) -> torch.UntypedStorage:
        if self._scratch.nbytes() < nbytes:
            self._scratch = torch.UntypedStorage(0, device=self.tape.device)  # free the old one first
            self._scratch = torch.UntypedStorage(nbytes, device=self.tape.device)
        return self._scratch

    def _restore(self, rng: GeneratorState) -> torch.Generator | None:
        if rng.private:
            return torch.Generator(rng.device).set_state(rng.state)
        set_generator_state(rng.device, rng.state)
        return None

    def _allocate(self, made: dict[int, torch.UntypedStorage], storage: int) -> None:
        nbytes = self.tape.nbytes[storage]
        self._add(made, storage, torch.UntypedStorage(nbytes, device=self.tape.device))

    def _add(self, made: dict[int, torch.UntypedStorage], number: int, storage: torch.UntypedStorage) -> None:
        made[number] = storage
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

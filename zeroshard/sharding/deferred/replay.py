"""Run parts of a tape on the real device and give the values that they end in.

One call makes the storages asked for, from nothing, in a little world of its own: only the operations that their
values depend on, in program order, each scratch storage freed after its last reader. The bytes alive are counted.

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
from zeroshard.sharding.deferred.tape import Constant, GeneratorState, Hole, Tape, TapeOp, TensorRef


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
def as_found(device: torch.device) -> Iterator[None]:
    """Leave the default generator of `device`, the default dtype and the grad mode as they were."""
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
        """The bytes of `storages` as they stand at the end of the tape so far.

        The caller owns them and hands them back with `free`.
        """
        steps = self.tape.history(storages)
        last_use: dict[int, int] = {}
        for index in steps:
            op = self.tape.ops[index]
            for storage in (*op.writes, *(ref.storage for ref in op.refs())):
                last_use[storage] = index
        world: dict[int, torch.UntypedStorage] = {}
        with as_found(self.tape.device):
            for index in steps:
                op = self.tape.ops[index]
                self.step(op, world)
                used = {*op.writes, *(ref.storage for ref in op.refs())}
                self.free(world, [s for s in used if last_use[s] == index and s not in storages])
            for storage in storages - world.keys():  # made by `torch.empty` and never written: any bytes will do
                self._allocate(world, storage)
        return world

    def draw(self, op: TapeOp, generator: torch.Generator | None) -> None:
        """Run a random operation for its effect on the generator alone: the real one, from where it stands now.

        All draws share one scratch buffer. Freeing each would leave a hole in the C heap that the next small
        allocation nibbles at, so that the next draw no longer fits: the process grew to the size of the model.
        """
        world = self.values(op.inputs)
        targets = op.writes - op.inputs - {ref.storage for ref in op.outputs if ref is not None}
        if targets:
            world[min(targets)] = self._scratch_of(self.tape.nbytes[min(targets)])
        with torch.no_grad():
            self._call(op, world, generator)
        if targets:
            del world[min(targets)]
        self.free(world, list(world))

    def let_go(self) -> None:
        """Give back the buffer of the draws; nothing will be drawn any more."""
        # Modes and hooks hold each other: without this it would stay, as large as the largest parameter, until Python
        # happens to collect cycles.
        self._scratch = torch.UntypedStorage(0, device=self.tape.device)

    def step(self, op: TapeOp, world: dict[int, torch.UntypedStorage]) -> None:
        """Run one operation from its recorded generator state; `world` gains what it makes."""
        generator = self._restore(op.rng) if op.rng is not None else None
        made = tree_flatten(self._call(op, world, generator))[0]
        for ref, value in zip(op.outputs, made, strict=True):
            if ref is None or ref.storage in world:
                continue
            nbytes = self.tape.nbytes[ref.storage]
            if ref.matches(value) and value.untyped_storage().nbytes() == nbytes:
                self._hold(world, ref.storage, value.untyped_storage())
            else:  # the shape rule predicted other strides than the kernel chose: later views go by the prediction
                self._allocate(world, ref.storage)
                ref.view(world[ref.storage]).copy_(value)

    def free(self, world: dict[int, torch.UntypedStorage], storages: list[int]) -> None:
        """Drop storages from `world`."""
        for storage in storages:
            if storage in world:
                self.live_bytes -= world.pop(storage).nbytes()

    def _call(self, op: TapeOp, world: dict[int, torch.UntypedStorage], generator: torch.Generator | None) -> Any:
        def fill(leaf: Any) -> Any:
            if isinstance(leaf, TensorRef):
                if leaf.storage not in world:
                    self._allocate(world, leaf.storage)
                return leaf.view(world[leaf.storage])
            if isinstance(leaf, Constant):
                if leaf.tensor._version != leaf.version:
                    raise UsageError(
                        f"a real tensor of shape {tuple(leaf.tensor.shape)} that was read under zeroshard.Init"
                        f" ({op.func}) was changed afterwards, before the model was sharded. Change a copy of it."
                    )
                return leaf.tensor
            if leaf is Hole.DEVICE:
                return self.tape.device
            return generator if leaf is Hole.GENERATOR else leaf

        args, kwargs = tree_map(fill, (op.args, op.kwargs))
        torch.set_default_dtype(op.default_dtype)
        return op.func(*args, **kwargs)

    def _scratch_of(self, nbytes: int) -> torch.UntypedStorage:
        if self._scratch.nbytes() < nbytes:
            self._scratch = torch.UntypedStorage(0, device=self.tape.device)  # let go of the old one first
            self._scratch = torch.UntypedStorage(nbytes, device=self.tape.device)
        return self._scratch

    def _restore(self, rng: GeneratorState) -> torch.Generator | None:
        if rng.private:
            return torch.Generator(rng.device).set_state(rng.state)
        set_generator_state(rng.device, rng.state)
        return None

    def _allocate(self, world: dict[int, torch.UntypedStorage], storage: int) -> None:
        nbytes = self.tape.nbytes[storage]
        self._hold(world, storage, torch.UntypedStorage(nbytes, device=self.tape.device))

    def _hold(self, world: dict[int, torch.UntypedStorage], number: int, storage: torch.UntypedStorage) -> None:
        world[number] = storage
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

"""`memory_breakdown`: what this process uses now, and what of it the plan put there, by kind of state."""

from __future__ import annotations

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.observing import StepFacts
from zeroshard.engine.outside_step.memory_use import memory_use
from zeroshard.observe.listeners import Silent
from zeroshard.plan.memory import StateBytes, state_bytes

MIB = 2**20


def by_kind(held: StateBytes) -> dict[str, int]:
    """Bytes of each kind of state of a rank, as a user calls them; kinds without any are left out."""
    kinds = {
        "parameters": held.param,
        "gradients": held.grad,
        "master weights": held.master,
        "moments": held.moments,
        "gather slots": held.gather_slots,
        "reduce slots": held.reduce_slots,
        "sum slots": held.sum_slots,
        "state buffers": held.state_buffers,
        "host": held.host,
        "disk": held.disk,
    }
    return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}


class MemoryLine(Silent):
    """Prints the memory in use.

    Args:
        every_step: print after each step, where no lines of progress are asked for.
    """

    def __init__(self, handle: Handle, *, every_step: bool) -> None:
        self._runtime = handle.runtime
        self._every_step = every_step

    def report(self, facts: StepFacts, *, due: bool) -> None:
        """Print the line where it is due."""
        if due or self._every_step:
            kinds = by_kind(state_bytes(self._runtime.plan))
            planned = ", ".join(f"{kind} {nbytes / MIB:.1f}" for kind, nbytes in kinds.items())
            print(f"step {facts.step}: memory: {memory_use()}; the plan's, in MiB: {planned}", flush=True)

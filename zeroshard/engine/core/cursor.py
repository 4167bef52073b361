"""A position in a program (a flat list of operations), which runs the list forward to the next use of a unit."""

from __future__ import annotations

from collections.abc import Callable

from zeroshard.plan.program import Op, OpKind, Program


class Cursor:
    """Walks a program once per pass.

    Args:
        program: the operations, in the order in which every rank issues them.
        execute: runs one operation.
    """

    def __init__(self, program: Program, execute: Callable[[Op], None]) -> None:
        self._ops = program
        self._execute = execute
        self._next = 0
        self._uses: dict[int, list[int]] = {}
        for index, op in enumerate(program):
            if op.kind is OpKind.USE:
                self._uses.setdefault(op.unit, []).append(index)

    @property
    def started(self) -> bool:
        return self._next > 0

    def rewind(self) -> None:
        """Begin the next pass at the start of the list."""
        self._next = 0

    def run_to_use(self, unit: int) -> bool:
        """Run all operations up to and including the next USE of `unit`. False, and nothing runs, if there is none."""
        ahead = [index for index in self._uses.get(unit, ()) if index >= self._next]
        if not ahead:
            return False
        self._run_until(ahead[0] + 1)
        return True

    def run_release(self, unit: int) -> bool:
        """Run the RELEASE of `unit` if it is the next operation; returns False if the next operation is another one.

        If the next operation is another USE of `unit`, it stays whole until then: True, and nothing runs.
        """
        if self._next < len(self._ops) and self._ops[self._next] == Op(OpKind.RELEASE, unit):
            self._run_until(self._next + 1)
            return True
        return self._next < len(self._ops) and self._ops[self._next] == Op(OpKind.USE, unit)

    def run_to_end(self) -> None:
        self._run_until(len(self._ops))

    def _run_until(self, stop: int) -> None:
        while self._next < stop:
            op = self._ops[self._next]
            self._next += 1  # before the operation, which may raise and must not run twice
            self._execute(op)

"""Runs the forward list of a plan: module hooks advance it, so that each unit is gathered, used and released.

    model.forward    enter -> begin a pass       pre_forward(unit) -> list up to USE unit
                     leave -> end it             post_forward(unit) -> RELEASE unit, and its output is watched

A forward may begin at the model, at a module that holds all of it, at a part of the root, or at a single unit. In a
recomputation, which runs within a backward, units are used out of order, and the list does not advance.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroshard.engine.core.autograd import in_backward, transforming
from zeroshard.engine.core.backward import Backward
from zeroshard.engine.core.cursor import Cursor
from zeroshard.engine.core.interrupted import refuse_transform
from zeroshard.engine.core.outputs import refuse_no_tensor
from zeroshard.engine.core.outside_reads import OutsideReads
from zeroshard.engine.core.parameters import Parameters
from zeroshard.engine.core.passes import CallTracker
from zeroshard.engine.core.streams import Streams
from zeroshard.engine.memory.unit import Unit


class Forward:
    """Follows a forward through the units, and owns the module hooks.

    Args:
        on_begin, on_end: called when a pass begins and when it ends.
        on_recover: drops what was left by a backward that ended in an exception.

    Attributes:
        inside: the module at which the running forward began; None between forwards.
        seen_order: units in the order of the first forward under grad; None once it is no longer recorded.
        repeats: whether a further micro-batch passes a unit, in the same order as the first one.
        compiled: whether compiled code runs units without their hooks (see module_hooks); all units rest whole then.
    """

    def __init__(
        self,
        units: list[Unit],
        root: int,
        parameters: Parameters,
        streams: Streams,
        tracker: CallTracker,
        reads: OutsideReads,
        backward: Backward,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
        on_recover: Callable[[], None],
    ) -> None:
        self._units, self._root = units, root
        self._parameters, self._streams = parameters, streams
        self._tracker, self._reads, self._backward = tracker, reads, backward
        self._on_begin, self._on_end, self._on_recover = on_begin, on_end, on_recover
        self.inside: int | None = None
        self._part: int | None = None
        self._nested = 0  # forwards of the same module that began within the running one and have not ended
        self.seen_order: list[int] | None = []
        self._saw_whole_model = False
        self.repeats = False
        self.compiled = False

    def adopt(self, cursor: Cursor) -> None:
        """Walk another list from the next pass on."""
        self._list = cursor

    @property
    def started(self) -> bool:
        """Whether the list has begun and not ended."""
        return self._list.started

    def recover(self) -> None:
        """Start anew after a forward or backward that ended in an exception."""
        self._list.rewind()
        if self.seen_order and not self._saw_whole_model:
            self.seen_order.clear()

    def pre_forward(self, index: int) -> None:
        """A unit's module is about to run: make its parameters whole."""
        self._backward.note_call(index)
        if in_backward():  # a recomputation: its post-hook may never run, so no call is recorded
            self._parameters.use(index)
            return
        if index == self._root:
            self._on_begin()
        elif self._tracker.current is None and torch.is_grad_enabled():
            refuse_transform(self._units)
            self._streams.adopt_current_stream()
            if self._backward.running:
                self._on_recover()
            self._tracker.begin_pass()  # a unit that is called directly: a pass of its own
        self._tracker.start_call(index)
        in_pass = self._tracker.current is not None and index != self._root and self._part is None
        if self.seen_order is not None and in_pass and not (self._saw_whole_model or self.repeats):
            self.seen_order.append(index)
        if not self._list.run_to_use(index):
            self._parameters.use(index)

    def post_forward(self, index: int, output: object) -> None:
        """A unit's module has run: watch its output's gradient and release the unit."""
        if in_backward():
            if torch.is_grad_enabled():
                self._backward.watch(index, output, None, self._tracker.recomputed_call(index))
            return
        call = self._tracker.end_call(index)
        if call is not None and torch.is_grad_enabled():
            if transforming():
                if index not in self._reads.kept:  # its derivative is taken after the release
                    refuse_transform((self._units[index],))
            else:
                if index != self._root:
                    refuse_no_tensor(self._units[index], output)
                self._backward.watch(index, output, *call)
        self._release(index)

    def _release(self, index: int) -> None:
        if index == self._root:
            self._end_pass()
        elif index in self._reads.kept:
            if self.inside is None and not torch.is_grad_enabled():  # called directly: no pass ends after it
                self._parameters.release(index)
        elif not self._list.run_release(index):
            self._parameters.release(index)

    def enter(self, entry: int) -> None:
        """A module that holds the whole root unit is about to run; the first such module begins the pass."""
        if in_backward():
            self._parameters.use(self._root)
        elif self.inside is None:
            self._begin_at(entry)
        elif self.inside == entry:  # for example, a hook of a module inside calls the model
            self._nested += 1

    def forget_interrupted(self) -> None:
        """The running forward has ended in an exception after which torch runs no hooks (KeyboardInterrupt)."""
        self.inside = self._part = None
        self._nested = 0

    def leave(self, entry: int, output: object, *, failed: bool) -> None:
        """Such a module has run, or ended in an exception."""
        mine = in_backward() or self.inside == entry
        if self._ends_nested(entry):
            return
        if self.inside == entry:
            self.inside = None
        if mine and not failed:
            self.post_forward(self._root, output)

    def enter_part(self, part: int) -> None:
        """A module that reads parameters of the root unit is about to run; outside of a pass it begins one."""
        if in_backward():
            return
        if self.inside is None:
            self._part = part
            self._begin_at(part)
        elif self._part == part:
            self._nested += 1

    def leave_part(self, part: int, output: object, *, failed: bool) -> None:
        """Such a module has run, or ended in an exception."""
        if self._part == part and not self._ends_nested(part):
            if not failed:
                self.post_forward(self._root, output)
            self.inside = self._part = None

    @torch.compiler.assume_constant_result
    def expect_compiled(self) -> bool:
        """torch.compile leaves out hooks of units, in this pass and in later ones. It calls this while it traces."""
        if not self.compiled:
            self.compiled = True
            self._use_all()
        return True

    def _use_all(self) -> None:
        """Make all units whole at once; the engine will see the backward of the whole pass only."""
        for unit in self._units:
            self._parameters.use(unit.index)
        if self._tracker.current is not None:
            self._tracker.current.unordered = True

    def _begin_at(self, module: int) -> None:
        self.inside, self._nested = module, 0
        self.pre_forward(self._root)
        if self.compiled:
            self._use_all()

    def _ends_nested(self, module: int) -> bool:
        """Whether only a nested forward of the same module has ended, so that the pass goes on."""
        if in_backward() or self.inside != module or not self._nested:
            return False
        self._nested -= 1
        return True

    def _end_pass(self) -> None:
        if self._part is None:
            self._list.run_to_end()  # a pass of a part does not gather the rest of the model
        self._list.rewind()
        self._on_end()
        if torch.is_grad_enabled():
            # The forwards of further micro-batches repeat the same order.
            self._saw_whole_model = self._saw_whole_model or self._part is None
        else:
            self._reads.release()
        self._tracker.end_pass()

"""Runs the backward list of a plan: hooks on the outputs of units advance it, and complete units are reduced.

    loss.backward    gradient of an output is ready -> list up to USE unit     end of the graph -> the rest of the list
                     REDUCE unit: it is pending until its gradients have come (see passes), then collected and released

An autograd graph is either the backward of a pass, or a piece of it (`in_pieces`), or an inner backward that a forward
runs (inner_backward), which does not advance the list. `_Run` holds the state of the pass's backward while it runs.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from zeroshard.engine.core.autograd import NodeOrder, accumulates, graph_task, node_number, tensor_to_hook
from zeroshard.engine.core.cursor import Cursor
from zeroshard.engine.core.gradients import Gradients
from zeroshard.engine.core.inner_backward import (
    InnerBackward,
    backward_ends_at,
    refuse_backward_in_forward,
    refuse_sharded,
)
from zeroshard.engine.core.interrupted import EndOfBackward, refuse_half_done
from zeroshard.engine.core.late_gradients import add_late_gradients, has_gradient
from zeroshard.engine.core.outputs import tensors_in
from zeroshard.engine.core.outside_reads import OutsideReads
from zeroshard.engine.core.parameters import Parameters
from zeroshard.engine.core.passes import CallTracker, ForwardPass
from zeroshard.engine.core.reduce_policy import ReducePolicy
from zeroshard.engine.core.streams import Streams
from zeroshard.engine.memory.unit import Unit


@dataclass
class _Run:
    """State of the running backward of a pass.

    Attributes:
        task: the number of its autograd graph; in pieces that of the running one, `_NO_TASK` between them.
        collects: whether it leaves gradients on parameters (`backward`) or returns them to its caller (`grad`).
        ending: gives the callback at the end of the graph; None if the graph failed.
        pending: units that the list has reached and whose gradients are incomplete, in the order of the list.
        end: the end number of the call whose output got its gradient last; -1 at the end of the graph.
        reached: in pieces, the units that the running one has reached.
    """

    task: int
    collects: bool
    ending: Callable[[], object]
    pending: deque[int] = field(default_factory=deque)
    end: int = 0
    reached: set[int] = field(default_factory=set)


_NO_TASK = -2
"""A backward in pieces waits for its next one. (-1 is autograd's number outside of any graph.)"""


class Backward:
    """Follows a backward through the units, and owns the hooks that it runs.

    Args:
        on_begin: called before the backward of a pass.
        forward_running: whether a forward is running.
        order: tells whether call numbers say which nodes have run.
    """

    def __init__(
        self,
        units: list[Unit],
        root: int,
        parameters: Parameters,
        gradients: Gradients,
        streams: Streams,
        tracker: CallTracker,
        reads: OutsideReads,
        reduce_policy: ReducePolicy,
        on_begin: Callable[[], None],
        forward_running: Callable[[], bool],
        order: NodeOrder,
    ) -> None:
        self._units, self._root = units, root
        self._parameters, self._gradients, self._streams = parameters, gradients, streams
        self._tracker, self._reads, self._reduce_policy = tracker, reads, reduce_policy
        self._on_begin, self._forward_running = on_begin, forward_running
        self._inner = InnerBackward(units, parameters)
        self.order = order
        self._run: _Run | None = None
        self._collects = True  # of the running backward, or of the last one
        self._call_began_at: dict[int, int] = {}  # by unit, autograd's node number when its last call began

    def adopt(self, cursor: Cursor, *, accumulate: bool) -> None:
        """Walk another list from the next backward on."""
        self._list, self._accumulate = cursor, accumulate

    @property
    def running(self) -> bool:
        """Whether the backward of a pass has begun and not ended; one that failed stays so until the next forward."""
        return self._run is not None

    def recover(self) -> bool:
        """Forget a backward that ended in an exception; returns whether there was one."""
        failed, self._run = self._run is not None, None
        self._list.rewind()
        self._inner.forget()
        if failed:
            self._tracker.end_backward()
        return failed

    def note_call(self, index: int) -> None:
        """A unit's module is about to run."""
        self._call_began_at[index] = torch.autograd._get_sequence_nr()

    def watch(self, index: int, output: object, graph: ForwardPass | None, end: int) -> None:
        """Advance the list when the gradient of any tensor of the output is ready.

        Tensors that a unit returns unchanged (a block that skips itself) are left out: their gradient is ready when
        another unit runs, and gathering this unit at that time would take the other one's slot.
        """
        seen_task = -1
        begun = -1 if index == self._root else self._call_began_at[index]

        def ready(origin: weakref.ref[torch.Tensor], gradient: torch.Tensor) -> None:
            nonlocal seen_task
            task = graph_task()
            if self._run is not None and self._run.task == _NO_TASK:
                self._begin_piece(self._run, task)
            if task == seen_task or (not self._in_pass_backward() and backward_ends_at(origin)):
                return
            seen_task = task
            if torch.is_grad_enabled():  # create_graph
                self._watch_gradient(index, gradient)
            # This closure holds `graph`, which keeps the pass alive exactly as long as the autograd graph.
            self._pre_backward(index, end, graph)

        for tensor in tensors_in(output):
            if tensor.requires_grad and node_number(tensor) >= begun:
                hooked = tensor_to_hook(tensor, begun)
                hooked.register_hook(partial(ready, weakref.ref(hooked)))

    def _watch_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Watch the gradient of an output under create_graph: a backward of that graph may reach no other output."""
        if index != self._root and self._units[index].plan.sharded:
            refuse_sharded(self._units[index])

        def ready(origin: weakref.ref[torch.Tensor], _: torch.Tensor) -> None:
            if not self._in_pass_backward() and not backward_ends_at(origin):
                self._enter_pass_backward()

        if gradient.requires_grad:
            gradient.register_hook(partial(ready, weakref.ref(gradient)))

    def _pre_backward(self, index: int, end: int, graph: ForwardPass | None) -> None:
        run = self._run if self._in_pass_backward() else self._enter_pass_backward()
        if run is None:
            self._inner.use(index)
            return
        if graph is not None:
            self._tracker.reach(graph)
        run.end = end
        run.reached.add(index)
        self._finish_complete(run)
        if not self._list.run_to_use(index):
            self._parameters.use(index)

    def _in_pass_backward(self) -> bool:
        """Whether the running graph is known to be the backward of a pass."""
        return self._run is not None and graph_task() == self._run.task

    def _enter_pass_backward(self) -> _Run | None:
        """Begin or continue the backward of a pass; None for an inner backward.

        A reentrant checkpoint runs a part of the pass's backward in a graph of its own, which counts as that backward.
        """
        if self._inner.running:
            return None
        if self._run is not None and self._run.ending() is None:
            refuse_half_done("a backward")
        collects = accumulates(
            parameter for unit in self._units for group in unit.trainable for parameter in group.parameters
        )
        if self._forward_running():
            if collects:
                refuse_backward_in_forward()
            return None
        if self._run is not None:
            return self._run if collects else None
        return self._begin(collects)

    def _begin(self, collects: bool) -> _Run:
        end = EndOfBackward(self._end)
        run = self._begin_run(_Run(graph_task(), collects, weakref.ref(end)))
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return run

    def _begin_run(self, run: _Run) -> _Run:
        collects = run.collects
        self._on_begin()
        self._reduce_policy.begin_backward(collects)
        self._collects, self._run = collects, run
        self._streams.adopt_current_stream()
        self._tracker.end_pass()
        if not self.order.holds():
            self._tracker.lose_order()
        self._list.rewind()
        self._gradients.notice_dropped()
        if collects:
            self._gradients.discard_leftovers()
        self._reads.begin_backward()
        return run

    @contextmanager
    def in_pieces(self) -> Iterator[Callable[[], None]]:
        """Let all autograd graphs that run inside be pieces of the backward of one pass, whose graph was cut.

        Inside, `torch.autograd.backward` runs the pieces, in the reverse order of the blocks of the forward. The caller
        calls the function that it gets after each piece but the last one of a block: it adds the gradients of that
        piece to the sums of their units, so that parameters hold those of one micro-batch only.
        """
        end = EndOfBackward(self._end)
        self._begin_run(_Run(_NO_TASK, collects=True, ending=weakref.ref(end)))
        try:
            yield self._add_piece
        except BaseException:
            del end  # nothing holds it any more, so the backward counts as failed
            raise
        self._end()

    def _begin_piece(self, run: _Run, task: int) -> None:
        run.task = task
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_piece(run))

    def _end_piece(self, run: _Run) -> None:
        run.task = _NO_TASK
        self.order.backward_ends()

    @torch.no_grad()
    def _add_piece(self) -> None:
        assert self._run is not None
        reached, self._run.reached = self._run.reached, set()
        for index in sorted({*reached, self._root, *self._reads.kept}):
            unit = self._units[index]
            if any(map(has_gradient, unit.trainable)):
                self._gradients.finish_unit(unit, self._reduce_policy.factor, reduce_whole=False, reduce_sharded=False)

    def collect(self, gradients: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Take over gradients that `torch.autograd.grad` returned. Called by all ranks, while no graph runs.

        Args:
            gradients: parameters of units that are not sharded, and the gradients to add for them.
        """
        self._gradients.discard_leftovers()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        whole, sharded = self._reduce_policy.decide(self._accumulate)
        given = {id(parameter) for parameter, _ in gradients}
        for unit in reversed(self._units):
            if any(id(parameter) in given for group in unit.trainable for parameter in group.parameters):
                self._gradients.finish_unit(unit, 1.0, reduce_whole=whole, reduce_sharded=sharded)
        self._gradients.set_placeholders()

    def await_gradients(self, index: int) -> None:
        """Make a unit pending: the list has reached its reduce."""
        assert self._run is not None
        self._run.pending.append(index)
        self._parameters.await_gradients(index)
        self._finish_complete(self._run)

    def may_release(self, index: int) -> bool:
        """Whether a unit that the list releases may give up its values.

        A unit keeps them until its gradients are collected. The root keeps them until a backward that collects
        gradients, since such a backward may go through the graph of this one.
        """
        pending = self._run is not None and index in self._run.pending
        return not pending and (index != self._root or self._collects)

    def _finish_complete(self, run: _Run) -> None:
        """Collect and reduce pending units, in the order of the list, as long as their gradients are complete."""
        if run.pending and torch.is_grad_enabled():  # create_graph: gradients have a graph, their sums need none
            with torch.no_grad():
                self._finish_complete(run)
            return
        while run.pending and (run.end < 0 or self._tracker.complete(run.pending[0], run.end)):
            unit = self._units[run.pending.popleft()]
            if run.collects:
                whole, sharded = self._reduce_policy.decide(self._accumulate)
                self._gradients.finish_unit(
                    unit, self._reduce_policy.factor, reduce_whole=whole, reduce_sharded=sharded
                )
            if unit.index == self._root:
                self._parameters.keep_in_use(unit.index)
            else:
                self._parameters.release(unit.index)

    @torch.no_grad()
    def _end(self) -> None:
        run = self._run
        assert run is not None
        run.end = -1
        self._finish_complete(run)
        self._list.run_to_end()
        self._run = None
        self.order.backward_ends()
        self._tracker.end_backward()
        self._parameters.free_beside()
        if run.collects:
            for index in add_late_gradients(self._units, self._gradients, self._streams, self._reduce_policy.factor):
                self._reads.keep_gathered(index)
            self._gradients.set_placeholders()

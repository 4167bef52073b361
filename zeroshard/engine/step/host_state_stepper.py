"""The step for state in host memory that the processor updates, beside the next forward.

    main thread    norm, coefficient | forward: unit 0 . wait . copy up . gather | unit 1 . wait . copy up ...
    worker         -                 | update unit 0 | update unit 1 | update unit 2 | ...

Exact: the update takes the whole step's gradients, norm and hyper-parameters, and the forward waits for each unit, so
no value is ever a step old. One worker, since an update uses all cores of the rank. Rejected: updating a unit as soon
as its gradients are there, which can't clip and can't take back what it did when a later gradient is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.core.parameters import written_buffers
from zeroshard.engine.core.streams import Event
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.unit import Unit
from zeroshard.engine.memory.update_view import update_grad, update_param
from zeroshard.engine.step.step_base import regions_of_units
from zeroshard.engine.step.stepper import HostStepper
from zeroshard.errors import SpillError
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.updates import PiecewiseUpdate, group_options
from zeroshard.plan.legs import Stream

_Arrival = Callable[[], object]


class HostStateStepper(HostStepper):
    """Updates units whose state is on the device in the step, and hands the others to a worker thread."""

    def __init__(self, handle: Handle, update: PiecewiseUpdate, scaler: LossScaler | None) -> None:
        super().__init__(handle, update, scaler)
        self._piecewise = update
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-update")
        self._regions = regions_of_units(handle.runtime)

    def _apply(self, active: Sequence[bool], coefficient: float, groups: Sequence[Mapping[str, Any]]) -> None:
        runtime = self.handle.runtime
        runtime.parameters.before_write()
        if any(group.plan.param.away for unit in runtime.units for group in unit.groups):
            # Write after read: shards on the host belong to their copies to the device until those have been made.
            runtime.streams.wait_on_host()
        hyper = [dict(group_options(group)) for group in groups]  # schedules go on while the worker reads them
        self._piecewise.check(hyper)
        # Write after read: shards belong to their gathers until those have landed, for which compute has waited; and
        # read after write: gradients belong to compute and the reduces until then.
        begin = runtime.streams.record(Stream.COMPUTE, "step")
        runtime.streams.wait(Stream.UPLOAD, begin)
        runtime.streams.wait(Stream.DOWNLOAD, begin)
        order = list(dict.fromkeys((*runtime.plan.order, *range(len(runtime.units)))))
        self._told(partial(self._piecewise.begin, [number for index in order for number in self._away(index)]))
        for index in order:
            numbers = self._regions[index]
            update = partial(self._update, numbers, coefficient, active, hyper)
            if self._away(index):
                self._hand_over(runtime.units[index], update)
            else:
                update(())
        self.handle.last = None

    def _away(self, index: int) -> range:
        """The regions of a unit that the worker updates."""
        away = any(group.plan.updated_away for group in self.handle.runtime.units[index].trainable)
        return self._regions[index] if away else range(0)

    def _told(self, work: Callable[[], object]) -> None:
        """Do what may find the disk broken, of which all ranks are to hear."""
        try:
            work()
        except SpillError as error:
            self.handle.comm.watchdog.announce(error)
            raise

    def _update(
        self,
        numbers: range,
        coefficient: float,
        active: Sequence[bool],
        hyper: Sequence[Mapping[str, Any]],
        arrivals: Sequence[_Arrival],
    ) -> None:
        for arrival in arrivals:
            arrival()
        with torch.no_grad():
            for number in numbers:
                self._piecewise.apply_region(number, coefficient, active, hyper)

    def _hand_over(self, unit: Unit, update: Callable[[Sequence[_Arrival]], None]) -> None:
        """Let the worker update a unit, and the next forward wait for it."""
        arrivals = [arrival for group in unit.trainable if (arrival := self._bring_down(unit, group)) is not None]
        future = self._worker.submit(update, arrivals)
        self.handle.runtime.updates.defer(unit.index, partial(self._finish, unit, future), future.exception)

    def _bring_down(self, unit: Unit, group: Group) -> _Arrival | None:
        """Copy gradients that rest on the device to where the processor reads them."""
        landed, grad = group.landed, update_grad(group)
        if landed is None or group.plan.grad_away:
            return None
        streams = self.handle.runtime.streams
        streams.enqueue(
            Stream.DOWNLOAD,
            lambda: landed.copy_(grad, non_blocking=True),
            (("grad", unit.index),),
            (("landed", unit.index),),
        )
        event = streams.record(Stream.DOWNLOAD, ("landed", unit.index, id(group)))
        return streams.arrival(event)

    def _finish(self, unit: Unit, future: Future[None]) -> Event:
        """Wait for the worker, raising what went wrong there, and start the copy of the parameters to the device."""
        self._told(future.result)
        runtime = self.handle.runtime
        for group in unit.trainable:
            self._copy_up(unit, group)
        event = runtime.streams.record(Stream.UPLOAD, ("written", unit.index))
        runtime.updates.set_read_event(unit.index, event)
        return event

    def _copy_up(self, unit: Unit, group: Group) -> None:
        source, target = group.returning, update_param(group)

        def copy() -> None:
            if source is not None:  # else the parameters rest where the worker wrote them
                target.copy_(source, non_blocking=True)

        reads, writes = (("grad", unit.index),), written_buffers(unit.index)
        self.handle.runtime.streams.enqueue(Stream.UPLOAD, copy, reads, writes)

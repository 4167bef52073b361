"""A step for state off the device: worker threads update it on the processor, during the next forward.

    main thread    norm, coefficient | forward: unit 0 . wait . copy up . gather | unit 1 . wait . copy up ...
    worker         -                 | update unit 0 | update unit 1 | ...       state in host memory
    worker         -                 | update unit 5 | update unit 6 | ...       state on disk

The result is exact: updates use the gradients, norm and hyper-parameters of the whole step, and the forward waits for
each unit, so that it never uses old values. Units that rest whole are awaited within the step, by the gathers that
follow it: other code reads them between steps. There is one worker for host memory, since an update uses all cores of
the rank, and one for the disk, which would rest otherwise until the other is through. Moments in few bits pass the
device, which updates them (optim/adam/passing.py); the workers wait for its streams then. Rejected: updating a unit as
soon as its gradients are complete; that can't clip by the norm, and can't be undone when a later gradient is not
finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from zeroshard.engine.core.disk_failures import disk_failures_to
from zeroshard.engine.core.handle import Handle
from zeroshard.engine.core.parameters import written_buffers
from zeroshard.engine.core.streams import Event
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.unit import Unit
from zeroshard.engine.memory.update_view import update_grad, update_param
from zeroshard.engine.step.step_base import regions_of_units
from zeroshard.engine.step.stepper import HostStepper
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.updates import PiecewiseUpdate, group_options
from zeroshard.plan.legs import Stream

_Arrival = Callable[[], object]


class HostStateStepper(HostStepper):
    """Updates units whose state is on the device in the step, and hands the others to a worker thread."""

    def __init__(
        self,
        handle: Handle,
        update: PiecewiseUpdate,
        scaler: LossScaler | None,
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(handle, update, scaler)
        self._piecewise, self._buffers = update, buffers
        names = {False: "zeroshard-update", True: "zeroshard-disk-update"}
        self._workers = {on_disk: ThreadPoolExecutor(1, thread_name_prefix=name) for on_disk, name in names.items()}
        self._regions = regions_of_units(handle.runtime)

    @property
    def state_buffers(self) -> Sequence[torch.Tensor]:
        """See StepperBase."""
        return self._buffers

    def _apply(self, active: Sequence[bool], coefficient: float, groups: Sequence[Mapping[str, Any]]) -> None:
        runtime = self.handle.runtime
        runtime.parameters.before_write()
        if self._buffers or any(group.plan.param.off_device for unit in runtime.units for group in unit.groups):
            # Write after read: shards in host memory must have been copied to the device, and gathers have read those
            # there: the workers issue work on streams of their own, which wait for nothing else.
            runtime.streams.wait_on_host()
        hyper = [dict(group_options(group)) for group in groups]  # a copy: schedules change them during the update
        self._piecewise.check(hyper)
        # Write after read: the gathers must have read the shards; compute has waited for them. Read after write:
        # compute and the reduces must have written the gradients.
        begin = runtime.streams.record(Stream.COMPUTE, "step")
        runtime.streams.wait(Stream.UPLOAD, begin)
        runtime.streams.wait(Stream.DOWNLOAD, begin)
        order = list(dict.fromkeys((*runtime.plan.order, *range(len(runtime.units)))))
        with disk_failures_to(self.handle.comm.watchdog.announce):
            self._piecewise.begin([number for index in order for number in self._updated_by_worker(index)])
        for index in order:
            numbers = self._regions[index]
            update = partial(self._update, numbers, coefficient, active, hyper)
            if self._updated_by_worker(index):
                self._start_update(runtime.units[index], update)
            else:
                update(())
        self.handle.last = None

    def _updated_by_worker(self, index: int) -> range:
        """The regions of a unit that a worker updates."""
        off_device = any(group.plan.updated_off_device for group in self.handle.runtime.units[index].trainable)
        return self._regions[index] if off_device else range(0)

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

    def _start_update(self, unit: Unit, update: Callable[[Sequence[_Arrival]], None]) -> None:
        """Start a unit's update on its worker; the next forward waits for it."""
        arrivals = [
            arrival for group in unit.trainable if (arrival := self._copy_gradients_to_host(unit, group)) is not None
        ]
        future = self._workers[any(group.plan.passes_windows for group in unit.trainable)].submit(update, arrivals)
        self.handle.runtime.updates.defer(unit.index, partial(self._finish_update, unit, future), future.exception)

    def _copy_gradients_to_host(self, unit: Unit, group: Group) -> _Arrival | None:
        """Copy gradients that rest on the device to where the processor reads them."""
        landed, grad = group.landed, update_grad(group)
        if landed is None or group.plan.grad_off_device:
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

    def _finish_update(self, unit: Unit, future: Future[None]) -> Event:
        """Wait for the worker, raise its error if there is one, and start to copy the parameters to the device."""
        with disk_failures_to(self.handle.comm.watchdog.announce):
            future.result()
        runtime = self.handle.runtime
        for group in unit.trainable:
            self._copy_parameters_to_device(unit, group)
        event = runtime.streams.record(Stream.UPLOAD, ("written", unit.index))
        runtime.updates.set_read_event(unit.index, event)
        return event

    def _copy_parameters_to_device(self, unit: Unit, group: Group) -> None:
        source, target = group.returning, update_param(group)

        def copy() -> None:
            if source is not None:  # else the parameters rest where the worker wrote them
                target.copy_(source, non_blocking=True)

        reads, writes = (("grad", unit.index),), written_buffers(unit.index)
        self.handle.runtime.streams.enqueue(Stream.UPLOAD, copy, reads, writes)

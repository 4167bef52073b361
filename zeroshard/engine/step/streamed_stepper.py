"""A step on the device for optimizer state in host memory: pieces are uploaded, updated and downloaded in turn.

    UPLOAD      piece 0 | piece 1 | piece 2 | piece 3 ...        waits until the buffer's last piece is downloaded
    UPDATE              | piece 0 | piece 1 | piece 2 ...        waits for the upload
    DOWNLOAD                      | piece 0 | piece 1 ...        waits for the update
    forward of unit 0 as soon as its last piece is updated: the gather waits for that alone

It owns the buffers. The host issues all work in the step and does not wait. Uploads and downloads use both directions
of the link at once. Rejected: whole units as pieces, whose buffers would take a tenth of the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.core.parameters import written_buffers
from zeroshard.engine.core.streams import Event
from zeroshard.engine.step.device_stepper import DeviceStepper
from zeroshard.optim.adam.streamed_adam import StatePiece, StreamedAdam
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.plan.legs import Stream


class StreamedStepper(DeviceStepper):
    """Runs steps whose updates are partly made beside the next forward."""

    def __init__(self, handle: Handle, update: StreamedAdam, scaler: LossScaler | None) -> None:
        super().__init__(handle, update, scaler)
        self._streamed = update
        self._free: dict[int, Event] = {}

    @property
    def state_buffers(self) -> Sequence[torch.Tensor]:
        """See StepperBase."""
        return self._streamed.buffers

    def _before_updates(self) -> None:
        streams = self.handle.runtime.streams
        # Write after read: the last step's updates must have read the table of scalars.
        streams.wait(Stream.COMPUTE, streams.record(Stream.UPDATE, "all"))
        # Read after write: the last step's downloads must have written the state.
        streams.wait(Stream.UPLOAD, streams.record(Stream.DOWNLOAD, "all"))

    def _update_unit(self, index: int, numbers: range) -> None:
        runtime = self.handle.runtime
        if not any(self._streamed.pieces(number) for number in numbers):
            super()._update_unit(index, numbers)
            return
        streams = runtime.streams
        # Read after write: compute must have written table and gradients. Write after read: and have read the shards.
        prepared = streams.record(Stream.COMPUTE, "step")
        streams.wait(Stream.UPLOAD, prepared)
        streams.wait(Stream.UPDATE, prepared)
        # Parameters that rest on the device are written by the update, others by its download.
        last = Stream.DOWNLOAD if any(g.plan.param.off_device for g in runtime.units[index].groups) else Stream.UPDATE
        for number in numbers:
            for place, piece in enumerate(self._streamed.pieces(number)):
                self._issue_piece(index, piece, ("host", number, place), last)
        runtime.parameters.mark_unit_written(index, last)
        runtime.updates.set_read_event(index, streams.record(Stream.UPDATE, ("read", index)))

    def _issue_piece(self, unit: int, piece: StatePiece, rest: Hashable, last: Stream) -> None:
        streams, number = self.handle.runtime.streams, piece.buffer
        buffer, rests, grads = (("state", number),), (rest,), (("grad", unit),)
        written = {stream: written_buffers(unit) if stream is last else () for stream in Stream}
        if number in self._free:
            # Write after read: the last piece in the buffer must have been downloaded.
            streams.wait(Stream.UPLOAD, self._free[number])
        streams.enqueue(Stream.UPLOAD, piece.upload, (*rests, *grads), buffer)
        # Read after write: the upload must have finished.
        streams.wait(Stream.UPDATE, streams.record(Stream.UPLOAD, ("up", number)))
        streams.enqueue(Stream.UPDATE, piece.update, (*buffer, *grads), (*buffer, *written[Stream.UPDATE]))
        # Read after write: the update must have run.
        streams.wait(Stream.DOWNLOAD, streams.record(Stream.UPDATE, ("updated", number)))
        streams.enqueue(Stream.DOWNLOAD, piece.download, buffer, (*rests, *written[Stream.DOWNLOAD]))
        self._free[number] = streams.record(Stream.DOWNLOAD, ("down", number))

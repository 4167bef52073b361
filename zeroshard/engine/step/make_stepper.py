"""Chooses the stepper of an optimizer, by the tier of its state and by the kernels that exist for it."""

from __future__ import annotations

import torch

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.step.compressed_stepper import CompressedStepper
from zeroshard.engine.step.device_stepper import DeviceStepper
from zeroshard.engine.step.host_state_stepper import HostStateStepper
from zeroshard.engine.step.regions_of import make_update_context
from zeroshard.engine.step.step_base import StepperBase
from zeroshard.engine.step.stepper import HostStepper
from zeroshard.engine.step.streamed_stepper import StreamedStepper
from zeroshard.errors import PlanError
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.segments import refuse_split
from zeroshard.optim.sources import Source
from zeroshard.optim.update_context import UpdateContext
from zeroshard.optim.updates import UNSUPPORTED_OPTIONS, FlatUpdate, TorchUpdate, UpdateMethod
from zeroshard.plan.offload import stream_buffer_nbytes
from zeroshard.plan.policy import HostUpdate


def make_stepper(handle: Handle, source: Source, scaler: LossScaler | None) -> StepperBase:
    """A DeviceStepper on a GPU if the optimizer has a kernel, so that the host does not wait; else a HostStepper."""
    updates = handle.plan.updates
    context = make_update_context(handle, source.groups)
    _check_blocks(context, source)
    if len(updates) > 1:
        raise PlanError("offload: state is updated either by the processor or while it passes the device, in one plan")
    if updates:
        _refuse_low(context, "state in host memory")
    if HostUpdate.PROCESSOR in updates:
        if source.on_host is None:
            raise PlanError(
                f"offload: {_full_name(source)} can't update state in host memory; use Adam, AdamW, Adagrad, Lion, "
                "RMSprop or SGD without any of torch's special options, or keep the state on the device"
            )
        return HostStateStepper(handle, source.on_host(context), scaler)
    if HostUpdate.STREAMED in updates:
        if source.passing is not None:
            buffers = _stream_buffers(handle)
            update = source.passing(context, buffers, handle.plan.policy.stream_numel)
            return HostStateStepper(handle, update, scaler, buffers)
        return _streamed_stepper(handle, source, context, scaler)
    # The kernels of the device compute in float32.
    other = any(region.without_master or region.master.dtype == torch.float64 for region in context.regions)
    on_device = handle.device.type == "cuda" and source.on_device is not None and not other
    if not (on_device and source.split_master):
        refuse_split(context.regions, source.name)
    if on_device:
        assert source.on_device is not None
        return DeviceStepper(handle, source.on_device(context), scaler)
    if source.compressed is not None:
        _refuse_low(context, _full_name(source))
        return CompressedStepper(handle, source.compressed(context), scaler)
    made = source.update(context)
    _check_low(context, source, made)
    return HostStepper(handle, made, scaler)


def _check_low(context: UpdateContext, source: Source, made: UpdateMethod) -> None:
    """Raises PlanError where 16-bit parameters without master weights have an update that needs these."""
    if isinstance(made, TorchUpdate) and all(region.state_dtype != torch.float32 for region in context.regions):
        return  # torch keeps the state in the dtype of the parameters
    if not isinstance(made, FlatUpdate):
        _refuse_low(context, _full_name(source))


def _refuse_low(context: UpdateContext, what: str) -> None:
    """Raises PlanError where there are 16-bit parameters without master weights, which `what` needs."""
    for region in context.regions:
        if region.without_master:
            raise PlanError(
                f"{region.label} has no master weights, which {what} needs: keep the state on the device and use Adam, "
                "AdamW, SGD, Adagrad, Lion or RMSprop without any of torch's special options, or switch the master "
                "weights on again (bf16_master_weights_and_grads, fp16_master_weights_and_grads)"
            )


def _full_name(source: Source) -> str:
    """An optimizer's name, with the options for which zeroshard has no rule."""
    options = [name for name in UNSUPPORTED_OPTIONS if any(group.get(name) for group in source.groups)]
    options += ["an lr that is a tensor"] * any(isinstance(group.get("lr"), torch.Tensor) for group in source.groups)
    return source.name + (f" with {' and '.join(options)}" if options else "")


def _check_blocks(context: UpdateContext, source: Source) -> None:
    """Raises PlanError if the plan has moments in few bits but the optimizer has not; `low_bit` checks the converse."""
    for region in context.regions:
        if region.blocks is not None and source.blocks is None:
            raise PlanError(
                f"the plan keeps moments of {region.label} in {region.blocks.bits} bits, but {source.name} has them in "
                "float32; make the plan without Recipe(blocks=...), or use an optimizer such as AdamW8bit"
            )


def _streamed_stepper(
    handle: Handle, source: Source, context: UpdateContext, scaler: LossScaler | None
) -> StreamedStepper:
    """For state that passes through the device. Raises PlanError for an optimizer without a kernel for that."""
    if source.streamed is None:
        other = ", or Offload(update=HostUpdate.PROCESSOR) with this one" if source.on_host is not None else ""
        raise PlanError(
            f"offload: {source.name} has no kernel that streamed state could pass through; use Adam or AdamW{other}"
        )
    buffers = _stream_buffers(handle)
    update = source.streamed(context, buffers, handle.plan.policy.stream_numel)
    return StreamedStepper(handle, update, scaler)


def _stream_buffers(handle: Handle) -> list[torch.Tensor]:
    """Device memory of the plan's sizes, through which state passes."""
    return [torch.empty(n, dtype=torch.uint8, device=handle.device) for n in stream_buffer_nbytes(handle.plan)]

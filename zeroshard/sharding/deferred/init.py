"""Build a model that is too large for one rank, and give each rank the values that it owns.

    with Init():                    parameters are meta tensors; a tape records how each gets its values
        model = MyModel()
    materialize(model, ...)         one tensor at a time: make its values, pass them to `sink`, free them

No module, function or class of torch is changed: `__enter__` installs a dispatch mode, a function mode and torch's
public registration hooks, and `__exit__` removes them. The tape is attached to the storages of the model itself, so
several models, submodels built by other code, and models built outside can exist at the same time.

Rejected: patching `nn.Module.__init__` (it recurses in composite models, and collides with other code that patches it),
and calling `reset_parameters` on a meta model (most constructors do more than that). The latter is done only for a
plain meta model without a tape. See docs/decisions/0009-deferred-init.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zeroshard.errors import UsageError, ZeroShardWarning
from zeroshard.sharding.deferred.calls import active_tape
from zeroshard.sharding.deferred.record import Recorder
from zeroshard.sharding.deferred.replay import Replay
from zeroshard.sharding.deferred.tape import Mark, Tape, TensorRef, mark_of

Sink = Callable[[str, torch.Tensor, torch.Tensor], None]
_CREATED = "_zeroshard_init"


@runtime_checkable
class Resettable(Protocol):
    """torch's convention: a module that can fill its own direct parameters and buffers."""

    def reset_parameters(self) -> None: ...


_INIT_IS_OPEN = -1
"""The version counter of parameters whose `Init` has not closed yet."""


@dataclass
class _Created:
    """Attached to a parameter that was made under an `Init`.

    Attributes:
        started: when the tape of that `Init` began, see `Tape.started`.
        version: the parameter's version counter when the `Init` closed.
    """

    started: int
    version: int = _INIT_IS_OPEN


@dataclass(frozen=True)
class Materialized:
    """What `materialize` did: the number of tensors that were made, and the most bytes that were alive at once."""

    tensors: int
    peak_bytes: int


REMOTE_DEVICES = ("none", "cpu", "nvme")


class Init:
    """Context in which models are built without memory, as `deepspeed.zero.Init`, and without patching torch.

    Inside, a tensor made on `device`, which is the default device, is deferred: it is a meta tensor, and a tape records
    how to make its values. A tensor made on another device is real. Values are those of an ordinary build of the same
    code on `device`, bit for bit, with the same seed. The random generator always has the state that such a build would
    give it, inside and afterwards. `.item()`, `tolist()`, `numpy()` (read-only) and truth values work: the value is
    made immediately. What can't be deferred raises `UsageError` on that line. A nested `Init` records on the tape of
    the outer one.

    Args:
        enabled: False makes this a context that does nothing.
        dtype: floating dtype of tensors made without an explicit one, as `torch.set_default_dtype`.
        config_dict_or_path, config: accepted for compatibility; `initialize` reads the config, and decides the dtypes
            of compute and master weights. Init keeps the constructor's own dtype, so that master weights are exact.
        mem_efficient_linear: accepted for compatibility; `F.linear` is never replaced.
        remote_device: "none", "cpu" or "nvme", accepted for compatibility: parameters take no memory until
            `initialize`, whose offload_param.device says where they rest then.
        device: where values are made and random numbers are drawn. Default: the current accelerator, else the CPU.

    What DeepSpeed's other arguments say is decided by the plan here; a value that would change something is refused.

    Raises:
        UsageError: such an argument was given, an unknown `remote_device`, or a dtype that is not floating.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: object = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: object = None,
        config: object = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
        zero_param_parallel_group: object = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: object = None,
        param_swapper: object = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        _refuse_unless_inert(
            {
                "module": (module, "pass an existing model to zeroshard.shard or zeroshard.initialize"),
                "data_parallel_group": (data_parallel_group, "give the group to zeroshard.initialize"),
                "pin_memory": (pin_memory, "use offload_param.pin_memory in the config"),
                "mpu": (mpu, "give it to zeroshard.initialize"),
                "zero_param_parallel_group": (zero_param_parallel_group, "use zero_hpz_partition_size in the config"),
                "zero_quantized_weights": (zero_quantized_weights, "use the key of that name in the config"),
                "zero_quantized_nontrainable_weights": (
                    zero_quantized_nontrainable_weights,
                    "use the key of that name in the config",
                ),
                "sequence_data_parallel_group": (sequence_data_parallel_group, "give it to zeroshard.initialize"),
                "param_swapper": (param_swapper, "use offload_param in the config"),
            }
        )
        if remote_device not in (None, *REMOTE_DEVICES):
            known = ", ".join(REMOTE_DEVICES)
            raise UsageError(f"zeroshard.Init(remote_device={remote_device!r}): known are {known}")
        if dtype is not None and not dtype.is_floating_point:
            raise UsageError(f"zeroshard.Init(dtype={dtype}): parameters are floating. Use torch.bfloat16 or the like.")
        self.enabled = enabled
        self.dtype = dtype
        self.device = _with_index(torch.device(device) if device is not None else _default_device())
        self._open: list[ExitStack] = []

    def __enter__(self) -> Init:
        with ExitStack() as stack:
            if self.enabled:
                if active_tape() is None:
                    _start_recording(stack, Tape(self.device))
                if self.dtype is not None:
                    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                    torch.set_default_dtype(self.dtype)
            self._open.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.pop().__exit__(kind, error, trace)


def has_tape(model: nn.Module) -> bool:
    """Whether any parameter or buffer of `model` has no values yet but a tape that makes them."""
    return any(mark_of(tensor) is not None for _, tensor in _state(model))


def is_deferred(model: nn.Module) -> bool:
    """Whether any parameter or buffer of `model` is on the meta device, with a tape or without."""
    return any(tensor.is_meta for _, tensor in _state(model))


def fingerprints(model: nn.Module) -> list[str]:
    """Digests of the tapes of `model`, oldest first. They must be equal on all ranks, else these have other models."""
    tapes = {mark.tape for _, tensor in _state(model) if (mark := mark_of(tensor)) is not None}
    return [tape.fingerprint() for tape in sorted(tapes, key=lambda tape: tape.started)]


def materialize(
    model: nn.Module,
    device: torch.device | str | None,
    sink: Sink,
    *,
    wanted: Callable[[str], bool] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Materialized:
    """Make the values of the deferred parameters and buffers of `model`, one after another.

    Tensors that share a storage get views of one storage, in consecutive calls of `sink`. Real tensors are not touched.
    Plain tensor attributes of modules are filled in place. Global random generators are left unchanged. A model on the
    meta device without any tape is filled by `reset_parameters()`, module by module, with a warning.

    Args:
        device: where the values are moved; None leaves them on the device that `Init` was given.
        sink: called as `sink(name, tensor, value)` once for each of them, in module order, with its first name, the
            meta parameter or buffer of the model, and its value (same shape and dtype). The value belongs to the sink,
            and is freed when that returns unless it keeps it. A tensor that is left on the meta device can be made
            again.
        wanted: limits the work to the names for which it is true; nothing is computed for the rest.
        on_progress: called as `on_progress(done, total)` with numbers of tensors.

    Raises:
        UsageError: a tensor has neither values nor a tape, or was changed after its `Init` had closed; or it belongs to
            a scripted module.
    """
    deferred = [(name, tensor) for name, tensor in _state(model) if tensor.is_meta]
    _refuse_scripted(model)
    if deferred and not has_tape(model) and not any(_CREATED in vars(tensor) for _, tensor in deferred):
        _record_resets(model)
    groups = _by_storage(deferred)
    members_of_model = {id(tensor) for _, tensor in _state(model)}
    attributes = [(name, tensor) for name, tensor in _plain_attributes(model) if id(tensor) not in members_of_model]
    if wanted is not None:
        groups = {mark: members for mark, members in groups.items() if any(wanted(name) for name, _ in members)}
    total, done, peak = sum(len(members) for members in groups.values()), 0, 0
    for mark, members in groups.items():
        peak = max(peak, _materialize_storage(mark, members, device, sink))
        done += len(members)
        if on_progress is not None:
            on_progress(done, total)
    for mark, members in _by_storage(attributes).items():
        _materialize_storage(mark, members, device, fill_in_place)
    return Materialized(total, peak)


def fill_in_place(name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """A sink that makes the model's own tensor real: the Python object and its attributes stay."""
    # torch refuses `p.data = value` across devices, and `torch.utils.swap_tensors` for a parameter with weak
    # references, as every nn.LSTM has; these refer to the Python object, which stays.
    # `.data` gives it a version counter of its own: `value` may share its storage with other parameters.
    real = nn.Parameter(value.data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    torch._C._swap_tensor_impl(tensor, real)
    # The object still has its dicts of hooks, but autograd calls those of the other tensor until they are set again.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks) is not None:
            setattr(tensor, hooks, getattr(tensor, hooks))


def _materialize_storage(
    mark: Mark, members: list[tuple[str, torch.Tensor]], device: torch.device | str | None, sink: Sink
) -> int:
    """Make the values of one storage and pass every tensor in it to `sink`. Returns the most bytes that were alive."""
    replay = Replay(mark.tape)
    made = replay.values(frozenset({mark.storage}))
    views = [TensorRef.of(tensor, mark.storage).view(made[mark.storage]) for _, tensor in members]
    replay.free(made, [mark.storage])
    for name, tensor in members:
        value = views.pop(0)
        sink(name, tensor, value if device is None else value.to(device))
        if not tensor.is_meta:
            vars(tensor).pop(_CREATED, None)
    return replay.peak_bytes


def _start_recording(stack: ExitStack, tape: Tape) -> None:
    """Install the modes and hooks; `stack` removes them in reverse order."""
    recorder = Recorder(tape)
    created: dict[int, tuple[nn.Parameter, _Created]] = {}

    def record(parameter: nn.Parameter) -> None:
        if mark_of(parameter) is not None and id(parameter) not in created:
            created[id(parameter)] = (parameter, _Created(tape.started))
            vars(parameter)[_CREATED] = created[id(parameter)][1]

    def on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            record(parameter)

    def on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        for parameter in child.parameters() if child is not None else ():  # deep copies don't call the other hook
            record(parameter)

    def record_versions() -> None:
        for parameter, mark in created.values():
            mark.version = parameter._version

    stack.callback(recorder.replay.free_scratch)
    stack.callback(record_versions)
    stack.enter_context(recorder)
    stack.enter_context(recorder.calls)
    stack.callback(register_module_parameter_registration_hook(on_parameter).remove)
    stack.callback(register_module_module_registration_hook(on_module).remove)


def _record_resets(model: nn.Module) -> None:
    """Record `reset_parameters` of every module with direct meta tensors on a new tape."""
    owners = [
        (name, module)
        for name, module in model.named_modules()
        if any(tensor.is_meta for _, tensor in _direct(module, name))
    ]
    without_reset = [
        f"{name or 'the root'} ({type(module).__name__})"
        for name, module in owners
        if not isinstance(module, Resettable)
    ]
    if without_reset:
        raise UsageError(
            "the model is on the meta device, was not built under zeroshard.Init, and"
            f" {_listed(without_reset)} can't fill its parameters or buffers by itself (it has no `reset_parameters`)."
            " Build the model inside `with zeroshard.Init():`."
        )
    warnings.warn(
        "the model is on the meta device and was not built under zeroshard.Init: its values come from"
        " `reset_parameters` of each module, not from its constructor.",
        ZeroShardWarning,
        stacklevel=3,
    )
    with Init():
        for _, module in owners:
            if isinstance(module, Resettable):
                module.reset_parameters()


def _refuse_scripted(model: nn.Module) -> None:
    """Raises UsageError for a scripted module without values: torch's compiled code keeps references to its tensors."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(tensor.is_meta for _, tensor in _direct(module, path)):
            raise UsageError(
                f"{getattr(module, 'original_name', type(module).__name__)} was scripted (torch.jit.script) inside of "
                "Init, where its parameters have no values yet, and never gets them. Build and script it before the "
                "Init and hand it to the model, leave it unscripted, or build the model without Init"
            )


def _by_storage(deferred: list[tuple[str, torch.Tensor]]) -> dict[Mark, list[tuple[str, torch.Tensor]]]:
    """Group tensors by their storage. Raises UsageError for those whose values no tape makes."""
    groups: dict[Mark, list[tuple[str, torch.Tensor]]] = {}
    lost: list[str] = []
    for name, tensor in deferred:
        mark = mark_of(tensor)
        if mark is None or _changed_since(mark, tensor):
            lost.append(name)
        else:
            groups.setdefault(mark, []).append((name, tensor))
    if lost:
        raise UsageError(
            f"{_listed(lost)} of the model: on the meta device without recorded values, or changed after zeroshard.Init"
            " had closed (an initialisation, `model.to(dtype)` or `copy.deepcopy` outside of it is not recorded)."
            " Build and initialise the whole model inside one `with zeroshard.Init():`."
        )
    return groups


def _changed_since(mark: Mark, tensor: torch.Tensor) -> bool:
    """Whether a parameter was written after its `Init` closed (by anything but a later `Init`)."""
    created = vars(tensor).get(_CREATED)
    if not isinstance(created, _Created) or created.started != mark.tape.started or created.version == _INIT_IS_OPEN:
        return False
    return created.version != tensor._version


def _state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer once, in module order, under its first qualified name."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in _direct(module, prefix):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def _direct(module: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers that `module` itself owns."""
    yield from module.named_parameters(prefix, recurse=False)
    yield from module.named_buffers(prefix, recurse=False)


def _plain_attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Deferred tensors that modules hold as ordinary attributes, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and mark_of(value) is not None and id(value) not in seen:
                seen.add(id(value))
                yield f"{prefix}.{name}" if prefix else name, value


def _refuse_unless_inert(arguments: dict[str, tuple[Any, str]]) -> None:
    for name, (value, instead) in arguments.items():
        if value is not None and value is not False:
            raise UsageError(f"zeroshard.Init({name}=...) has no meaning here: the plan decides placement. {instead}.")


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")


def _with_index(device: torch.device) -> torch.device:
    """The device with its index: the generator of plain `cuda` would change with `torch.cuda.set_device`."""
    if device.type == "cpu" or device.index is not None:
        return torch.device(device.type) if device.type == "cpu" else device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

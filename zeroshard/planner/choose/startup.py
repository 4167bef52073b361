"""The choice at start-up: the least that has to be divided or moved for the model to fit what is really free.

    without offload     stages 1, 2, 3, 0    the quickest that fits where rates are known, else the first; one rank: 0
    offload cpu         stages 1, 2, 3    with the least share of the optimizer's state that has to go
    offload cpu+param   stage 3

A row of candidates is looked at only where none of the row above fits: offload is always slower. Activations come from
a trace of the real model with an example batch; without one they are assumed, and the reason says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zeroshard.errors import PlanError
from zeroshard.plan.builder import reordered
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.plan import Plan
from zeroshard.plan.report import human_bytes
from zeroshard.planner.choose.choice import SAME_SPEED
from zeroshard.planner.machine.hardware import Cluster
from zeroshard.planner.predict.memory import Moment, step_memory
from zeroshard.planner.predict.rows import ALLOCATOR_FIXED, ALLOCATOR_SHARE, ROOM
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.predict.timeline import step_time
from zeroshard.planner.trace.checkpointing import Checkpointing, enable
from zeroshard.planner.trace.model_trace import Trace, trace
from zeroshard.planner.trace.twin import meta_batch, meta_twin, samples_in, shortened
from zeroshard.planner.trace.workload import loss_of
from zeroshard.sharding.units import UnitSpec

ACTIVATION_SHARE = 0.4
"""Share of the free memory that is left to activations where nothing is known of them."""
ORDER = {Offload.NONE: (1, 2, 3, 0), Offload.CPU: (1, 2, 3), Offload.CPU_PARAM: (3,)}
SHARES = 20
"""Offloaded shares of the optimizer's state are looked for in steps of one over this."""
MakePlan = Callable[[int, Offload, bool, float], Plan]
"""The plan of a stage, an offload and its share; True adds accumulators. Raises PlanError for what can't be run."""


@dataclass(frozen=True)
class Room:
    """What is free on the rank that has least.

    Attributes:
        device, host: bytes for this rank; host 0 where nothing may be offloaded.
        ranks: data-parallel ranks; on one there is nothing to divide.
        gpu: whether the device is one: allocators, workspaces and kernels of GPUs.
        cluster: of which rates are known, None where they are not; then stages are not compared by time.
    """

    device: int
    host: int
    ranks: int
    gpu: bool
    cluster: Cluster | None = None


@dataclass(frozen=True)
class Example:
    """What the forward is called with: one micro-batch. `origin` says where it comes from, for the reason."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    origin: str = "the example batch"

    @property
    def samples(self) -> int:
        return samples_in([self.args, self.kwargs])


_NO_HOST = (
    "state is to be in host memory, of which none is left here (where the device is the processor, all of it is the "
    "device's); leave the offload out, give the stage, or say how much of the memory is the device's (device_memory)"
)


_FORBIDDEN = '. Offload was not looked at, for it is forbidden (offload=False, or "device": "none" in the config)'


@dataclass(frozen=True)
class Decision:
    """The stage and offload to take, the share of the optimizer's state that goes, and why, in a sentence."""

    stage: int
    offload: Offload
    reason: str
    share: float = 1.0


@dataclass(frozen=True)
class _Need:
    """What a candidate takes: bytes on the device and the host of one rank, and what is largest when."""

    stage: int
    offload: Offload
    plan: Plan
    device: int
    host: int
    peak: Moment
    share: float = 1.0

    @property
    def label(self) -> str:
        if self.offload is Offload.NONE:
            return f"stage {self.stage}"
        part = "" if self.share == 1 else f" of {self.share:.0%} of the optimizer's state"
        return f"stage {self.stage} with offload {self.offload.value}{part}"


def decide(
    model: nn.Module,
    units: list[UnitSpec],
    make: MakePlan,
    room: Room,
    example: Example | None,
    *,
    offloads: tuple[Offload, ...] = (Offload.NONE, Offload.CPU, Offload.CPU_PARAM),
    share: float | None = None,
) -> Decision:
    """Choose.

    Args:
        offloads: those that may be taken.
        share: of the optimizer's state, where an offload's is given; None looks for the least that is enough.

    Raises:
        PlanError: nothing fits, with the cheapest change, or nothing can be run.
    """
    tracer = _Tracer(model, units, example)
    refused: list[str] = []
    looked: list[_Need] = []
    for offload in offloads:
        if offload is not Offload.NONE and room.host <= 0:
            continue
        needs = [need for need in _needs(make, offload, tracer, room, refused, share) if need is not None]
        looked += needs
        able = [need for need in needs if _fits(need, tracer, room)]
        if able:
            best = _best(able, tracer, room)
            best = _least_share(best, make, tracer, room) if share is None else best
            return Decision(best.stage, best.offload, _reason(best, looked, tracer, room), best.share)
    if not looked:
        raise PlanError(f"auto: no stage can be run: {refused[0] if refused else _NO_HOST}")
    forbidden = "" if Offload.CPU in offloads or Offload.CPU_PARAM in offloads else _FORBIDDEN
    raise PlanError(_nothing_fits(looked, make, tracer, room) + forbidden)


class _Tracer:
    """Traces of the model, made when they are first asked for; why there is none."""

    def __init__(self, model: nn.Module, units: list[UnitSpec], example: Example | None) -> None:
        self._model, self._units, self.example = model, units, example
        self._found: dict[tuple[int, Checkpointing], Trace | None] = {}
        self.why_not = "" if example is not None else "no example batch was given"

    def of(self, plan: Plan, how: Checkpointing = Checkpointing.OFF, samples: int = 0) -> Trace | None:
        """A trace with `samples` (0: all) of the example; None where there is none."""
        if self.example is None or (self.why_not and not self._found):
            return None
        key = (samples, how)
        if key not in self._found:
            try:
                self._found[key] = self._run(plan, self.example, how, samples)
            except Exception as error:  # a forward may raise anything on tensors without values
                first = (str(error).splitlines() or [type(error).__name__])[0]
                self.why_not = f"the model can't be traced with {self.example.origin} ({first})"
                self._found[key] = None
        return self._found[key]

    def _run(self, plan: Plan, example: Example, how: Checkpointing, samples: int) -> Trace:
        twin = meta_twin(self._model)
        dtypes = {s.name: g.shown_dtype for _, g in plan.groups() for s in g.layout.segments}
        for name, parameter in twin.named_parameters():
            parameter.data = parameter.data.to(torch_dtype(dtypes[name]))
        enable(twin, self._units, how)
        args, kwargs = meta_batch(example.args), meta_batch(example.kwargs)
        if samples:
            args, kwargs = (shortened(part, example.samples, samples) for part in (args, kwargs))
        cast = plan.policy.cast_inputs
        if cast is not None:
            args, kwargs = (_cast(part, torch_dtype(cast)) for part in (args, kwargs))
        with torch.enable_grad():
            return trace(twin, self._units, args, kwargs, loss=loss_of, tokens=example.samples)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(one, batch)


def _least_share(all_of_it: _Need, make: MakePlan, tracer: _Tracer, room: Room) -> _Need:
    """The same with as much of the optimizer's state on the device as fits: what a share takes grows with it."""
    if all_of_it.offload is not Offload.CPU:
        return all_of_it
    best, none, enough = all_of_it, 0, SHARES
    while enough - none > 1:
        middle = (none + enough) // 2
        share = middle / SHARES
        plan = make(all_of_it.stage, Offload.CPU, False, share)
        need = _need(all_of_it.stage, Offload.CPU, plan, tracer.of(plan), room, share)
        if _fits(need, tracer, room) and need.device <= max(ROOM * room.device, all_of_it.device):
            best, enough = need, middle
        else:
            none = middle
    return best


def _needs(
    make: MakePlan, offload: Offload, tracer: _Tracer, room: Room, refused: list[str], share: float | None
) -> Iterator[_Need | None]:
    part = share if share is not None and offload is Offload.CPU else 1.0
    for stage in (0,) if room.ranks == 1 and offload is Offload.NONE else ORDER[offload]:
        try:
            plan = make(stage, offload, False, part)
        except PlanError as error:
            refused.append(f"stage {stage}: {error}")
            continue
        yield _need(stage, offload, plan, tracer.of(plan), room, part)


def _need(stage: int, offload: Offload, plan: Plan, traced: Trace | None, room: Room, share: float = 1.0) -> _Need:
    if traced is not None:
        plan = reordered(plan, (0, *traced.order))
    memory = step_memory(plan, traced or Trace((), (), (), (), 1), gpu=room.gpu)
    slack = int(ALLOCATOR_FIXED + ALLOCATOR_SHARE * memory.peak.total) if room.gpu else 0
    host = sum(memory.tiers.host.values())
    return _Need(stage, offload, plan, memory.peak.total + slack, host, memory.peak, share)


def _fits(need: _Need, tracer: _Tracer, room: Room) -> bool:
    limit = room.device if tracer.of(need.plan) is not None else int(room.device * (1 - ACTIVATION_SHARE))
    return need.device <= limit and need.host <= max(0, room.host)


def _best(able: list[_Need], tracer: _Tracer, room: Room) -> _Need:
    able = [need for need in able if need.device <= ROOM * room.device] or able
    traced = tracer.of(able[0].plan)
    if room.cluster is None or traced is None:
        return able[0]
    cluster = room.cluster
    times = [step_time(need.plan, traced, cluster).seconds for need in able]
    close = [need for need, seconds in zip(able, times, strict=True) if seconds <= min(times) * (1 + SAME_SPEED)]
    return min(close, key=lambda need: need.device)


def _reason(best: _Need, looked: list[_Need], tracer: _Tracer, room: Room) -> str:
    """Why this one: what it takes of what is free, what the one before would have taken, what was assumed."""
    parts = [
        f"{best.label} takes {human_bytes(best.device)} of {human_bytes(room.device)} that are free on the device"
        + (f" and {human_bytes(best.host)} of {human_bytes(room.host)} of host memory" if best.host else "")
        + f" (peak: {best.peak.label})"
    ]
    larger = [need for need in looked if need is not best and not _fits(need, tracer, room)]
    if larger:
        parts.append(f"{larger[-1].label} would take {human_bytes(larger[-1].device)}")
    if tracer.of(best.plan) is None:
        parts.append(f"{tracer.why_not}, so {ACTIVATION_SHARE:.0%} are left to activations")
    else:
        assert tracer.example is not None
        parts.append(f"activations traced with {tracer.example.origin}")
    return "; ".join(parts)


def _nothing_fits(looked: list[_Need], make: MakePlan, tracer: _Tracer, room: Room) -> str:
    """The message: what the smallest takes and when, and the mildest change that would do."""
    least = min(looked, key=lambda need: (max(0, need.device - room.device), need.host))
    kind, nbytes = max(least.peak.nbytes.items(), key=lambda item: item[1])
    short = (
        f"{human_bytes(least.device)} of {human_bytes(room.device)} that are free on the device"
        if least.device > room.device or not least.host
        else f"{human_bytes(least.host)} of {human_bytes(max(0, room.host))} of host memory"
    )
    assumed = f"; {tracer.why_not}, so {ACTIVATION_SHARE:.0%} are left to activations" if tracer.why_not else ""
    return (
        f"auto: nothing fits. The smallest, {least.label}, takes {short} at the {least.peak.label}, most of it {kind} "
        f"({human_bytes(nbytes)}){assumed}. Cheapest change: {_change(least, make, tracer, room)}"
    )


def _change(least: _Need, make: MakePlan, tracer: _Tracer, room: Room) -> str:
    samples = tracer.example.samples if tracer.example is not None else 1
    halves = [samples // 2**power for power in range(1, samples.bit_length()) if samples % 2**power == 0]
    for how in (Checkpointing.OFF, Checkpointing.ON):
        for count in [*([0] if how is Checkpointing.ON else []), *halves]:
            made = _changed(least, make, tracer, room, how, count)
            if made is not None and made.device <= room.device and made.host <= max(0, room.host):
                parts = [f"a micro-batch of {count} and {samples // count} times the accumulation"] if count else []
                parts += ["activation checkpointing"] if how is Checkpointing.ON else []
                return f"{' and '.join(parts)} with {least.label} ({human_bytes(made.device)})"
    return "more ranks or devices with more memory, or a smaller model; no change of batch or checkpointing is enough"


def _changed(
    least: _Need, make: MakePlan, tracer: _Tracer, room: Room, how: Checkpointing, samples: int
) -> _Need | None:
    if tracer.why_not:
        return None
    plan = make(least.stage, least.offload, bool(samples), 1.0)
    traced = tracer.of(plan, how, samples)
    return None if traced is None else _need(least.stage, least.offload, plan, traced, room)

"""Chooses stage and offload at start-up, by the memory that is free then.

    without offload     stages 1, 2, 3, 0    the fastest that fits if rates are known, else the first; on one rank 0
    offload cpu         stages 1, 2, 3    with the least share of the optimizer's state that has to be offloaded
    offload cpu+param   stage 3

Candidates of a line are tried only if none of the line above fits, since offload is slower. Activations come from a
trace of the model with an example batch; without an example a share of the memory is left to them, and the reason says
so.
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
from zeroshard.planner.predict.rows import SAFE_SHARE, slack_nbytes
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.predict.timeline import step_time
from zeroshard.planner.trace.checkpointing import Checkpointing, enable
from zeroshard.planner.trace.meta_copy import meta_batch, meta_copy, samples_in, shortened
from zeroshard.planner.trace.model_trace import Trace, trace
from zeroshard.planner.trace.workload import loss_of
from zeroshard.sharding.units import UnitSpec

ACTIVATION_SHARE = 0.4
"""Share of the free memory that is left to activations if they can't be traced."""
ORDER = {Offload.NONE: (1, 2, 3, 0), Offload.CPU: (1, 2, 3), Offload.CPU_PARAM: (3,)}
SHARES = 20
"""Offloaded shares of the optimizer's state are multiples of one over this."""
MakePlan = Callable[[int, Offload, bool, float], Plan]
"""Makes the plan of a stage, an offload, accumulation or not, and the offloaded share; PlanError if it can't be run."""


@dataclass(frozen=True)
class FreeMemory:
    """What is free on the rank that has the least.

    Attributes:
        device, host: bytes for one rank; host 0 if nothing may be offloaded.
        ranks: data-parallel ranks; with one there is nothing to divide.
        gpu: whether the device is a GPU, with its allocator and workspaces.
        cluster: the cluster, if its rates are known; None if they are not, and stages are not compared by time.
    """

    device: int
    host: int
    ranks: int
    gpu: bool
    cluster: Cluster | None = None


@dataclass(frozen=True)
class Example:
    """One micro-batch: the arguments of a forward. `origin` says where it comes from, for the reason."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    origin: str = "the example batch"

    @property
    def samples(self) -> int:
        return samples_in([self.args, self.kwargs])


_NO_HOST = (
    "the offload needs host memory, of which none is left (on a processor the device takes all of it); leave the "
    "offload out, give the stage, or say how much of the memory is the device's (device_memory)"
)


_FORBIDDEN = '. Offload was not tried, since it is forbidden (offload=False, or "device": "none" in the config)'


@dataclass(frozen=True)
class Decision:
    """The chosen stage and offload, the share of the optimizer's state that is offloaded, and why, in a sentence."""

    stage: int
    offload: Offload
    reason: str
    share: float = 1.0


@dataclass(frozen=True)
class _Need:
    """What a candidate takes: bytes on the device and the host of one rank, and its peak."""

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
    free: FreeMemory,
    example: Example | None,
    *,
    offloads: tuple[Offload, ...] = (Offload.NONE, Offload.CPU, Offload.CPU_PARAM),
    share: float | None = None,
) -> Decision:
    """Choose a stage and an offload.

    Args:
        make: makes the plans of candidates.
        offloads: the offloads that may be chosen.
        share: the share of the optimizer's state that offload cpu takes; None finds the least that fits.

    Raises:
        PlanError: nothing fits (the message has the cheapest change), or nothing can be run.
    """
    tracer = _Tracer(model, units, example)
    refused: list[str] = []
    looked: list[_Need] = []
    for offload in offloads:
        if offload is not Offload.NONE and free.host <= 0:
            continue
        needs = [need for need in _needs(make, offload, tracer, free, refused, share) if need is not None]
        looked += needs
        able = [need for need in needs if _fits(need, tracer, free)]
        if able:
            best = _best(able, tracer, free)
            best = _least_share(best, make, tracer, free) if share is None else best
            return Decision(best.stage, best.offload, _reason(best, looked, tracer, free), best.share)
    if not looked:
        raise PlanError(f"auto: no stage can be run: {refused[0] if refused else _NO_HOST}")
    forbidden = "" if Offload.CPU in offloads or Offload.CPU_PARAM in offloads else _FORBIDDEN
    raise PlanError(_nothing_fits(looked, make, tracer, free) + forbidden)


class _Tracer:
    """Makes and keeps traces of the model; `why_not` says why there is none."""

    def __init__(self, model: nn.Module, units: list[UnitSpec], example: Example | None) -> None:
        self._model, self._units, self.example = model, units, example
        self._found: dict[tuple[int, Checkpointing], Trace | None] = {}
        self.why_not = "" if example is not None else "no example batch was given"

    def of(self, plan: Plan, how: Checkpointing = Checkpointing.OFF, samples: int = 0) -> Trace | None:
        """A trace with `samples` samples of the example (0: all); None if there is none."""
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
        copied = meta_copy(self._model)
        dtypes = {s.name: g.shown_dtype for _, g in plan.groups() for s in g.layout.segments}
        for name, parameter in copied.named_parameters():
            parameter.data = parameter.data.to(torch_dtype(dtypes[name]))
        enable(copied, self._units, how)
        args, kwargs = meta_batch(example.args), meta_batch(example.kwargs)
        if samples:
            args, kwargs = (shortened(part, example.samples, samples) for part in (args, kwargs))
        cast = plan.policy.cast_inputs
        if cast is not None:
            args, kwargs = (_cast(part, torch_dtype(cast)) for part in (args, kwargs))
        with torch.enable_grad():
            return trace(copied, self._units, args, kwargs, loss=loss_of, tokens=example.samples)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(one, batch)


def _least_share(all_offloaded: _Need, make: MakePlan, tracer: _Tracer, free: FreeMemory) -> _Need:
    """The same with as much of the optimizer's state on the device as fits, found by bisection."""
    if all_offloaded.offload is not Offload.CPU:
        return all_offloaded
    best, too_few, enough = all_offloaded, 0, SHARES
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        share = middle / SHARES
        plan = make(all_offloaded.stage, Offload.CPU, False, share)
        need = _need(all_offloaded.stage, Offload.CPU, plan, tracer.of(plan), free, share)
        if _fits(need, tracer, free) and need.device <= max(SAFE_SHARE * free.device, all_offloaded.device):
            best, enough = need, middle
        else:
            too_few = middle
    return best


def _needs(
    make: MakePlan, offload: Offload, tracer: _Tracer, free: FreeMemory, refused: list[str], share: float | None
) -> Iterator[_Need | None]:
    part = share if share is not None and offload is Offload.CPU else 1.0
    for stage in (0,) if free.ranks == 1 and offload is Offload.NONE else ORDER[offload]:
        try:
            plan = make(stage, offload, False, part)
        except PlanError as error:
            refused.append(f"stage {stage}: {error}")
            continue
        yield _need(stage, offload, plan, tracer.of(plan), free, part)


def _need(
    stage: int, offload: Offload, plan: Plan, traced: Trace | None, free: FreeMemory, share: float = 1.0
) -> _Need:
    if traced is not None:
        plan = reordered(plan, (0, *traced.order))
    memory = step_memory(plan, traced or Trace((), (), (), (), 1), gpu=free.gpu)
    slack = slack_nbytes(memory) if free.gpu else 0
    host = sum(memory.tiers.host.values())
    return _Need(stage, offload, plan, memory.peak.total + slack, host, memory.peak, share)


def _fits(need: _Need, tracer: _Tracer, free: FreeMemory) -> bool:
    limit = free.device if tracer.of(need.plan) is not None else int(free.device * (1 - ACTIVATION_SHARE))
    return need.device <= limit and need.host <= max(0, free.host)


def _best(able: list[_Need], tracer: _Tracer, free: FreeMemory) -> _Need:
    able = [need for need in able if need.device <= SAFE_SHARE * free.device] or able
    traced = tracer.of(able[0].plan)
    if free.cluster is None or traced is None:
        return able[0]
    cluster = free.cluster
    times = [step_time(need.plan, traced, cluster).seconds for need in able]
    close = [need for need, seconds in zip(able, times, strict=True) if seconds <= min(times) * (1 + SAME_SPEED)]
    return min(close, key=lambda need: need.device)


def _reason(best: _Need, looked: list[_Need], tracer: _Tracer, free: FreeMemory) -> str:
    """What the chosen candidate takes of what is free, what a larger one would take, and what was assumed."""
    parts = [
        f"{best.label} takes {human_bytes(best.device)} of {human_bytes(free.device)} that are free on the device"
        + (f" and {human_bytes(best.host)} of {human_bytes(free.host)} of host memory" if best.host else "")
        + f" (peak: {best.peak.label})"
    ]
    larger = [need for need in looked if need is not best and not _fits(need, tracer, free)]
    if larger:
        parts.append(f"{larger[-1].label} would take {human_bytes(larger[-1].device)}")
    if tracer.of(best.plan) is None:
        parts.append(f"{tracer.why_not}, so {ACTIVATION_SHARE:.0%} are left to activations")
    else:
        assert tracer.example is not None
        parts.append(f"activations traced with {tracer.example.origin}")
    return "; ".join(parts)


def _nothing_fits(looked: list[_Need], make: MakePlan, tracer: _Tracer, free: FreeMemory) -> str:
    """The error: what the smallest candidate takes at its peak, and the cheapest change that makes it fit."""
    least = min(looked, key=lambda need: (max(0, need.device - free.device), need.host))
    kind, nbytes = max(least.peak.nbytes.items(), key=lambda item: item[1])
    short = (
        f"{human_bytes(least.device)} of {human_bytes(free.device)} that are free on the device"
        if least.device > free.device or not least.host
        else f"{human_bytes(least.host)} of {human_bytes(max(0, free.host))} of host memory"
    )
    assumed = f"; {tracer.why_not}, so {ACTIVATION_SHARE:.0%} are left to activations" if tracer.why_not else ""
    return (
        f"auto: nothing fits. The smallest, {least.label}, takes {short} at the {least.peak.label}, most of it {kind} "
        f"({human_bytes(nbytes)}){assumed}. Cheapest change: {_change(least, make, tracer, free)}"
    )


def _change(least: _Need, make: MakePlan, tracer: _Tracer, free: FreeMemory) -> str:
    samples = tracer.example.samples if tracer.example is not None else 1
    halves = [samples // 2**power for power in range(1, samples.bit_length()) if samples % 2**power == 0]
    for how in (Checkpointing.OFF, Checkpointing.ON):
        for count in [*([0] if how is Checkpointing.ON else []), *halves]:
            made = _changed(least, make, tracer, free, how, count)
            if made is not None and made.device <= free.device and made.host <= max(0, free.host):
                parts = [f"a micro-batch of {count} and {samples // count} times the accumulation"] if count else []
                parts += ["activation checkpointing"] if how is Checkpointing.ON else []
                return f"{' and '.join(parts)} with {least.label} ({human_bytes(made.device)})"
    return "more ranks or devices with more memory, or a smaller model; no change of batch or checkpointing is enough"


def _changed(
    least: _Need, make: MakePlan, tracer: _Tracer, free: FreeMemory, how: Checkpointing, samples: int
) -> _Need | None:
    if tracer.why_not:
        return None
    plan = make(least.stage, least.offload, bool(samples), 1.0)
    traced = tracer.of(plan, how, samples)
    return None if traced is None else _need(least.stage, least.offload, plan, traced, free)

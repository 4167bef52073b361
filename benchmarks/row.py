"""One measurement of a model that is not benchmarks.llama's: what benchmarks.moe_row and benchmarks.long_row share.

    floor          forward and backward in bf16 alone, on each GPU for itself: no optimizer, no communication
    fsdp2          fully_shard on every block and the root, bf16 parameters and reduction, fused AdamW
    zeroshard3     ZeRO stage 3 by `zeroshard.shard`, with its kernels, and the state that it keeps in host memory

The loop, its clocks and peaks are those of benchmarks.train. A loss that is not finite ends the process with an error.
What the planner says of the plan that ran stands beside, and where rank 0's time went:

    join_s, init_s, first_s, warm_s, timed_s, planned_s      what is left of a row's seconds are imports and the end
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import record_function

from benchmarks.engines import load
from benchmarks.planned import figures, machine
from benchmarks.planner_cases import RECIPE
from benchmarks.setting import BETAS, CLIP, DECAY, OPTIMIZER, MicroBatch, Trainer, backward, numel_of
from benchmarks.train import (
    PEAKS,
    finish,
    host_peak,
    limit_memory,
    memory,
    slowest,
    start,
    synchronize,
    timed,
    warmed_up,
)
from zeroshard.mesh import Mesh, MeshAxis
from zeroshard.plan.builder import reordered, with_peer_copies
from zeroshard.plan.check import peer_problem
from zeroshard.plan.offload import Offload as HostState
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import HostUpdate
from zeroshard.planner.machine.hardware import Cluster
from zeroshard.planner.predict.rows import Setting as Planned
from zeroshard.planner.predict.rows import reaches_peers, recipe_at
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.compiled import compiled
from zeroshard.planner.trace.workload import Workload

ENGINES = ("floor", "fsdp2", "zeroshard3")
OFFLOADS = ("none", "streamed", "processor")
RATE = 1e-4
SEED = 0
BATCHES = 2


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        axis, parts: the axis of the mesh along which as many ranks divide the model ("ep", "sp"); parts 1: none.
        samples, length: a micro-batch of one rank that reads data: sequences, and tokens in each of them.
        first_length: tokens in each of the first step.
        vocabulary: token ids are below it.
        flops: that forward and backward of one token need, without recomputation.
        make: builds the model, under whatever context; its forward takes ids and targets, and gives the mean loss.
        place: tells the model which ranks divide it.
        fill: gives values to one that was built on the meta device and has storage since.
        blocks: that are compiled, and units of FSDP2.
        work: the planner's view of one rank's part.
    """

    engine: str
    axis: str
    parts: int
    samples: int
    length: int
    first_length: int
    vocabulary: int
    accumulation: int
    checkpointing: bool
    compiled: bool
    offload: str
    host_share: float
    flops: float
    make: Callable[[], nn.Module]
    fill: Callable[[nn.Module, torch.device], None]
    place: Callable[[nn.Module, DeviceMesh], None]
    blocks: Callable[[nn.Module], Iterable[nn.Module]]
    work: Callable[[], Workload]

    @property
    def tokens(self) -> float:
        """Of one step and rank."""
        readers = self.parts if self.axis == "sp" else 1
        return self.samples * self.length * self.accumulation / readers


def add_options(parser: argparse.ArgumentParser, *, length: int, warmup: int, steps: int, repetitions: int) -> None:
    """What both kinds of rows are told."""
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--length", type=int, default=length, help="tokens per sequence")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--compile", action="store_true", help="compile every block")
    parser.add_argument("--offload", choices=OFFLOADS, default="none", help="optimizer's state in host memory")
    parser.add_argument("--host-share", type=float, default=1.0, help="the share of it")
    parser.add_argument("--cap-gib", type=float, help="GiB of the card that may be used, as if it had no more")
    parser.add_argument("--steps", type=int, default=steps, help="steps between two syncs")
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--warmup", type=int, default=warmup, help="steps before the timed ones")
    parser.add_argument("--no-plan", action="store_true", help="no prediction")
    parser.add_argument("--calibration", type=Path, help="with rates that zeroshard doctor measured on this machine")


def run(args: argparse.Namespace, case_of: Callable[[], Case], identity: Mapping[str, Any]) -> int:
    """Join the ranks, measure, print the JSON of rank 0."""
    began = time.perf_counter()
    device = start()
    seconds = {"join_s": round(time.perf_counter() - began, 2)}
    limit_memory(args.cap_gib, device)
    load(args.engine)
    row = measure(case_of(), args, device, seconds)
    if dist.get_rank() == 0:
        print(json.dumps({**identity, **row}), flush=True)
    sys.stdout.flush()
    if not math.isfinite(row["loss"]):
        print(f"rank {dist.get_rank()}: the loss is {row['loss']}", file=sys.stderr, flush=True)
        os._exit(1)
    dist.destroy_process_group()
    return 0


def measure(case: Case, args: argparse.Namespace, device: torch.device, seconds: dict[str, float]) -> dict[str, Any]:
    """Build, warm up, time, ask the planner, close."""
    clock = Clock(device, seconds)
    before = host_peak()
    trainer = build(case, device)
    clock.lap("init_s")
    init_gib = memory(device, torch.cuda.memory_allocated, trainer.outside)
    feed = batches(case, case.length, device)
    first = trainer.step(batches(case, case.first_length, device)[0]).clone()
    clock.lap("first_s")
    step = warmed_up(trainer, feed, device, args.warmup)
    clock.lap("warm_s")
    timing = timed(step, device, args.steps, args.repetitions)
    clock.lap("timed_s")
    median = statistics.median(timing.steps)
    row = {
        **described(case, device),
        "params": trainer.numel,
        "step_s": round(median, 5),
        "step_s_all": [round(one, 5) for one in timing.steps],
        "host_s": round(timing.host, 5),
        "tokens_s": round(case.tokens / median),
        "mfu": utilization(case.tokens / median * case.flops, device),
        "allocated_gib": slowest(memory(device, torch.cuda.max_memory_allocated, trainer.outside)),
        "reserved_gib": slowest(memory(device, torch.cuda.max_memory_reserved, trainer.outside)),
        "host_gib": slowest(host_peak()),
        "host_before_gib": slowest(before),
        "init_gib": init_gib,
        "first_loss": round(float(first), 4),
        "loss": round(timing.loss, 4),
    }
    plan = trainer.plan()
    if plan is not None and not args.no_plan and dist.get_rank() == 0:
        row["planned"] = _planned(case, plan, args.calibration)
    clock.lap("planned_s")
    finish(trainer, device)
    return {**row, **seconds}


class Clock:
    """Notes the seconds since the last lap, once the device is through."""

    def __init__(self, device: torch.device, seconds: dict[str, float]) -> None:
        self._device, self._seconds, self._began = device, seconds, time.perf_counter()

    def lap(self, name: str) -> None:
        synchronize(self._device)
        now = time.perf_counter()
        self._seconds[name], self._began = round(now - self._began, 2), now


def described(case: Case, device: torch.device) -> dict[str, Any]:
    """What was measured, and on what."""
    names = ("engine", "accumulation", "checkpointing", "compiled", "offload", "host_share", "length")
    return {
        **{name: getattr(case, name) for name in names},
        "batch": case.samples,
        "ep": case.parts if case.axis == "ep" else 1,
        "sp": case.parts if case.axis == "sp" else 1,
        "world": dist.get_world_size(),
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def utilization(flops: float, device: torch.device) -> float | None:
    """Model flops per second over the card's dense bf16 peak; None for an unknown card."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    return None if peak is None else round(flops / peak, 4)


def batches(case: Case, length: int, device: torch.device) -> list[list[MicroBatch]]:
    """Random tokens of this rank, on the device; ranks that have parts of a sequence have other tokens, too."""
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    length = length // case.parts if case.axis == "sp" else length
    feed: list[list[MicroBatch]] = []
    for _ in range(BATCHES):
        rows = [
            torch.randint(case.vocabulary, (case.samples, length + 1), generator=generator).to(device)
            for _ in range(case.accumulation)
        ]
        feed.append([(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows])
    return feed


# Engines


def build(case: Case, device: torch.device) -> Trainer:
    """The engine of a case, on all ranks."""
    torch.manual_seed(SEED)
    return {"floor": build_floor, "fsdp2": build_fsdp2, "zeroshard3": build_zeroshard}[case.engine](case, device)


def build_floor(case: Case, device: torch.device) -> Trainer:
    model = _filled(case, device)

    def step(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        return backward(model, micro_batches)

    return Trainer(step, numel_of(model))


def build_fsdp2(case: Case, device: torch.device) -> Trainer:
    with torch.device("meta"):
        model = case.make()
    _compile(case, model)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
    options["mesh"] = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in case.blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device=device)
    case.fill(model, device)
    optimizer = _adamw(model.parameters(), fused=device.type == "cuda")  # on CPU fused AdamW does not know DTensors

    def step(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        loss = backward(model, micro_batches, len(micro_batches))
        with record_function(OPTIMIZER):
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    return Trainer(step, numel_of(model))


def build_zeroshard(case: Case, device: torch.device) -> Trainer:
    import zeroshard

    if case.axis == "ep" and case.parts > 1:
        model = _filled(case, device)  # experts are divided by their values: each rank has all of them for a while
    else:
        with zeroshard.Init(device=device):
            model = case.make()
        _compile(case, model)
    numel, mesh = numel_of(model), _device_mesh(case, device)
    if mesh is not None:
        case.place(model, mesh)
    made = zeroshard.Recipe(
        sharding=zeroshard.STAGES[3],
        precision=zeroshard.Precision(param="bf16"),
        policy=zeroshard.ExecutionPolicy(clip_norm=CLIP, accumulate=case.accumulation > 1, overlap_step=True),
        offload=_host_state(case),
    )
    sharded, optimizer = zeroshard.shard(model, partial(_adamw, fused=False), plan=made, mesh=mesh, device=device)
    assert optimizer is not None

    def step(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        loss = backward(sharded, micro_batches, len(micro_batches))
        with record_function(OPTIMIZER):
            optimizer.step()
            optimizer.zero_grad()
        return loss

    outside, plan = zeroshard.peer_memory_nbytes(sharded), partial(zeroshard.plan_of, sharded)
    return Trainer(step, numel, outside, lambda: zeroshard.close(sharded), plan)


def _filled(case: Case, device: torch.device) -> nn.Module:
    """The whole model in bf16 on this rank's device."""
    with torch.device("meta"):
        model = case.make().to(torch.bfloat16)
    model.to_empty(device=device)
    case.fill(model, device)
    _compile(case, model)
    return model


def _compile(case: Case, model: nn.Module) -> None:
    for block in case.blocks(model) if case.compiled else ():
        block.compile()


def _adamw(parameters: Iterable[nn.Parameter], *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, weight_decay=DECAY, fused=fused)


def _host_state(case: Case) -> HostState | None:
    if case.offload == "none":
        return None
    return HostState(case.host_share, update=HostUpdate(case.offload))


def _device_mesh(case: Case, device: torch.device) -> DeviceMesh | None:
    if case.parts == 1:
        return None
    data = dist.get_world_size() // case.parts
    return init_device_mesh(device.type, (data, case.parts), mesh_dim_names=("dp_shard", case.axis))


def mesh_of(case: Case, world: int) -> Mesh:
    """The same for the planner."""
    if case.parts == 1:
        return Mesh.data_parallel(world)
    names = {"dp_replicate": 1, "dp_shard": world // case.parts, case.axis: case.parts}
    return Mesh(tuple(MeshAxis(name, size) for name, size in names.items()))


# Predictions


def _planned(case: Case, plan: Plan, calibration: Path | None) -> dict[str, Any]:
    """The planner's figures for the plan that ran."""
    return _figures(case, plan, case.work(), machine(dist.get_world_size(), calibration))


def predicted(case: Case, cluster: Cluster, work: Workload | None = None) -> dict[str, Any]:
    """The planner's figures for a case at stage 3 before it runs, and `total_gib`, all that it takes of a card."""
    work = case.work() if work is None else work
    recipe = RECIPE
    if case.offload != "none":
        recipe = replace(recipe, offload=_host_state(case))
    offload = Offload.NONE if case.offload == "none" else Offload.CPU
    setting = Planned(3, offload, Checkpointing.OFF, case.host_share)
    chosen = recipe_at(recipe, setting, case.accumulation)
    plan, _ = work.plan(chosen, mesh_of(case, cluster.count), Checkpointing.OFF)
    if reaches_peers(cluster) and peer_problem(plan) is None:
        plan = with_peer_copies(plan)
    return _figures(case, plan, work, cluster)


def _figures(case: Case, plan: Plan, work: Workload, cluster: Cluster) -> dict[str, Any]:
    traced = work.trace(plan, Checkpointing.OFF)  # the model checkpoints by itself
    traced = compiled(traced, keeps_inputs_only=case.checkpointing) if case.compiled else traced
    return figures(reordered(plan, (0, *traced.order)), traced, cluster, case.accumulation, case.tokens)

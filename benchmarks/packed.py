"""Bases in 4 bits (bitsandbytes, nf4, double quantization) with LoRA on one GPU: losses, memory, the largest model.

    python -m benchmarks packed --stages                 losses at stages 0 to 3 beside plain torch and peft
    python -m benchmarks packed --layers 4 --layers 40   peak of memory beside the planner's, of Llama-70B's width
    python -m benchmarks packed --largest                the most layers that fit by the plan: found, built, measured
    python -m benchmarks packed --saved                  saved, loaded, merged; what transformers opens of it

Needs transformers, peft and bitsandbytes. Models are Llama's from a config with random weights, LoRA of rank 16 on all
linear layers but the head, one sequence of `--length` tokens a step, AdamW, clipped. With `--layers` and `--largest`:
stage 3, bf16, checkpointed blocks, each weight quantized on the GPU as it is made. `allocated` is the peak of torch's
allocator over the last two of four steps, beside what `zeroshard plan` says of the same two files (`--write FOLDER`
keeps them); the command ends with 1 where they differ by more than 3 %. With `--stages` everything is in float32, so
that losses can be compared to 1e-5, and in bf16, where rounding differs and each loss is printed alone.

Without a GPU `--width tiny --length 64` tries it; --largest then only plans.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard
from benchmarks.packed_model import WIDTHS, Width, adapted, base, batch, write
from benchmarks.packed_saved import saved
from benchmarks.planned import machine
from benchmarks.train import start
from zeroshard.mesh import Mesh
from zeroshard.planner.choose.configs import default_document, read_config, with_batch, with_setting
from zeroshard.planner.machine.hardware import GIB, Cluster, parse_cluster
from zeroshard.planner.predict.memory import Moment, step_memory
from zeroshard.planner.predict.rows import Setting, recipe_at
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.predict.timeline import step_time
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.sources import find_source, with_adapter
from zeroshard.planner.trace.workload import Workload

STEPS, WARMUP = 4, 2
NEAR, SAME = 0.03, 1e-5
"""Largest relative distances: of memory to the plan, and of losses to those of plain torch."""
SETTING = Setting(3, Offload.NONE, Checkpointing.ON)


def document_of(cluster: Cluster, setting: Setting) -> dict[str, Any]:
    """The config of the engine, as `zeroshard plan` takes it without a --config."""
    return with_setting(with_batch(default_document(cluster.gpu), 1, 1), setting)


@dataclass(frozen=True)
class Planned:
    """A step by the planner: its memory at the peak, and seconds."""

    peak: Moment
    seconds: float


def predict(width: Width, length: int, cluster: Cluster, folder: Path) -> Planned:
    """A step by the planner, from the files in `folder`, which this writes."""
    source = with_adapter(find_source(str(write(folder, width, length))), folder)
    read = read_config(document_of(cluster, SETTING), cluster, keep_fp32=source.keep_fp32)
    recipe = recipe_at(read.recipe, SETTING, 1)
    plan, traced = Workload(source, 1, length).plan(recipe, Mesh.data_parallel(1), SETTING.checkpointing)
    return Planned(step_memory(plan, traced).peak, step_time(plan, traced, cluster).seconds)


def most_layers(width: Width, length: int, cluster: Cluster, allowed: int, folder: Path) -> tuple[int, Planned]:
    """The most layers whose peak stays below `allowed` bytes, and their plan.

    Peaks grow by the same amount with each layer, so two small models say nearly what is looked for; the models around
    it are planned whole.
    """
    few, more = (predict(width.deep(layers), length, cluster, folder).peak.total for layers in (8, 16))
    layers = max(1, 8 + (allowed - few) * 8 // (more - few))
    found = predict(width.deep(layers), length, cluster, folder)
    while found.peak.total > allowed and layers > 1:
        layers -= 1
        found = predict(width.deep(layers), length, cluster, folder)
    return layers, found


@dataclass(frozen=True)
class Measured:
    """One training: peaks of the allocator in bytes, seconds, and the losses of all steps."""

    allocated: int
    reserved: int
    build_s: float
    init_s: float
    step_s: float
    losses: list[float]


def measure(width: Width, length: int, device: torch.device, cluster: Cluster, *, last: bool) -> Measured:
    """Build, shard and train a model at stage 3. `last`: nothing comes after it, so that its memory is left alone."""
    began = time.perf_counter()
    with zeroshard.QuantizedInit():
        model = base(width, length, device, torch.bfloat16)
    model = adapted(model, device)
    synchronize(device)
    built = time.perf_counter()
    engine, *_ = zeroshard.initialize(model=model, config=document_of(cluster, SETTING))
    synchronize(device)
    ready = time.perf_counter()
    losses: list[float] = []
    for step in range(STEPS):
        if step == WARMUP:
            begin_count(device)
            warm = time.perf_counter()
        loss = engine(**batch(width, length, device, step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        del loss
    synchronize(device)
    seconds = (time.perf_counter() - warm) / (STEPS - WARMUP)
    allocated, reserved = peaks(device)
    if not last:
        engine.destroy()
    return Measured(allocated, reserved, built - began, ready - built, seconds, losses)


def begin_count(device: torch.device) -> None:
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peaks(device: torch.device) -> tuple[int, int]:
    """Allocated and reserved; zeros without a GPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_row(
    width: Width, args: argparse.Namespace, device: torch.device, found: Planned, *, last: bool = False
) -> bool:
    """Measure a model and print it beside its plan; whether they are near."""
    planned = found.peak.total
    print(
        f"plan of {width.layers} layers: {planned / GIB:.2f} GiB at {found.peak.label}, {found.seconds:.2f} s a step",
        flush=True,
    )
    got = measure(width, args.length, device, args.machine, last=last)
    off = got.allocated / planned - 1
    cells = (
        f"{width.numel / 1e9:.1f}e9 | {planned / GIB:.2f} | {got.allocated / GIB:.2f} | {off:+.1%} | "
        f"{got.reserved / GIB:.2f} | {got.build_s:.0f} | {got.init_s:.0f} | {got.step_s:.2f} | "
        f"{got.losses[0]:.4f}, {got.losses[-1]:.4f}"
    )
    print("| layers | parameters | planned GiB | allocated | off | reserved | build s | init s | step s | losses |")
    print(f"| {width.layers} | {cells} |", flush=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return device.type != "cuda" or abs(off) <= NEAR


# Losses


def plain(width: Width, length: int, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Losses of torch and peft alone; below float32 with masters in float32, as mixed precision has them."""
    model = adapted(base(width, length, device, dtype), device, trained=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in trained]
    for parameter in trained:
        parameter.data = parameter.data.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.01)
    losses: list[float] = []
    for step in range(STEPS):
        loss = model(**batch(width, length, device, step)).loss
        loss.backward()
        for parameter, master in zip(trained, masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        for parameter, master in zip(trained, masters, strict=True):
            parameter.data.copy_(master.data)
        losses.append(float(loss.detach()))
    return losses


def sharded(width: Width, length: int, device: torch.device, dtype: torch.dtype, stage: int) -> list[float]:
    """Losses of the engine at a stage, of rank 0's batches."""
    with zeroshard.QuantizedInit() if stage == 3 else nullcontext():
        model = base(width, length, device, dtype)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = zeroshard.initialize(model=adapted(model, device, trained=True), config=config)
    losses: list[float] = []
    for step in range(STEPS):
        loss = engine(**batch(width, length, device, step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return losses


def stages(width: Width, length: int, device: torch.device) -> bool:
    """Print the losses at all stages beside those of plain torch; whether float32 is the same to SAME."""
    same = True
    for dtype in (torch.float32, torch.bfloat16):
        expected = plain(width, length, device, dtype)
        shown = " ".join(f"{loss:.6f}" for loss in expected)
        print(f"{dtype}: torch and peft      {shown}", flush=True)
        for stage in range(4):
            got = sharded(width, length, device, dtype, stage)
            gap = max(abs(one / other - 1) for one, other in zip(got, expected, strict=True))
            print(f"{dtype}: stage {stage}, off {gap:.1e}  {' '.join(f'{loss:.6f}' for loss in got)}", flush=True)
            same = same and (dtype is not torch.float32 or gap < SAME)
    return same


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", action="store_true", help="losses of the width `small`, or of --width")
    parser.add_argument("--saved", action="store_true", help="the same width")
    parser.add_argument("--layers", type=int, action="append", default=[], help="may be repeated")
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--width", choices=WIDTHS, help="whose shape (70b; small for --stages and --saved)")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--cluster", help="the card to plan for (this machine's)")
    parser.add_argument("--keep-device", type=float, default=3.0, help="GiB that --largest leaves alone")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="keep config.json and adapter_config.json there")
    args = parser.parse_args(argv)
    if not (args.stages or args.saved or args.layers or args.largest):
        parser.error("say what to measure: --stages, --saved, --layers N or --largest")
    return args


def run(args: argparse.Namespace, device: torch.device, folder: Path) -> bool:
    """Everything that was asked for; whether all of it holds."""
    small, wide = WIDTHS[args.width or "small"], WIDTHS[args.width or "70b"]
    good = True
    if args.stages:
        good = stages(small, args.length, device) and good
    if args.saved:
        good = saved(small, args.length, device, folder) and good
    for layers in args.layers:
        width = wide.deep(layers)
        good = memory_row(width, args, device, predict(width, args.length, args.machine, folder)) and good
    if args.largest:
        allowed = int(args.machine.gpu.memory - args.keep_device * GIB)
        began = time.perf_counter()
        layers, found = most_layers(wide, args.length, args.machine, allowed, folder)
        print(
            f"largest by the plan: {layers} layers, {wide.deep(layers).numel / 1e9:.1f}e9 parameters, "
            f"{found.peak.total / GIB:.2f} of {allowed / GIB:.2f} GiB at {found.peak.label}; "
            f"{found.seconds:.2f} s a step; planned in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        for name, nbytes in sorted(found.peak.nbytes.items(), key=lambda item: -item[1]):
            print(f"    {name:16} {nbytes / GIB:8.2f} GiB")
        if device.type == "cuda":
            good = memory_row(wide.deep(layers), args, device, found, last=True) and good
    return good


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # pieces of what is freed serve any size
    torch.backends.cuda.matmul.allow_tf32 = False
    device = start()
    args.machine = machine(1) if args.cluster is None else parse_cluster(args.cluster)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.write or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        good = run(args, device, folder)
    torch.distributed.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""On GPUs, with NCCL, peer copies and Triton kernels: bits depend neither on the stage nor on where state rests.

Run by `pytest tests/gpu` on a machine with GPUs; everything here is skipped elsewhere, where the same promises are
tested over gloo. The model is large enough that copies, kernels and collectives really run beside each other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import zeroshard
from benchmarks.llama import Llama, Shape
from tests.support.beside import needs_torchao, use_beside
from tests.support.disk import disk_folder
from tests.support.distributed import run_ranks
from zeroshard.nvme.places import Spill
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES, Tier
from zeroshard.plan.policy import ExecutionPolicy, HostUpdate

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
BACKEND = "cpu:gloo,cuda:nccl"
SHAPE = Shape(dim=1024, layers=6, heads=16, kv_heads=4, ffn=2816, vocabulary=4096)
BATCH, LENGTH, STEPS = 2, 256, 6


@dataclass(frozen=True)
class Case:
    """One way to train the same model."""

    stage: int = 3
    micro: int = 1
    offload: Offload | None = None
    master: str | None = None
    clip: float = 0.5
    overlap: bool = True
    peer_copies: bool | None = None
    drain: bool = False
    """Finish each step before the next forward."""
    watched: bool = True
    """Steps in which the host waits for the device are errors."""
    bits: int = 32
    """Of the moments."""

    def recipe(self) -> Recipe:
        policy = ExecutionPolicy(clip_norm=self.clip, accumulate=self.micro > 1, overlap_step=self.overlap)
        precision = Precision(param="bf16", master=self.master)
        return Recipe(
            sharding=STAGES[self.stage],
            precision=precision,
            policy=policy,
            offload=self.offload,
            peer_copies=self.peer_copies,
        )


@dataclass
class Result:
    """What a training gave on a rank; parameters as float32, all in one, in order of their names."""

    losses: list[float]
    parameters: torch.Tensor


def train(case: Case, rank: int, steps: int = STEPS) -> Result:
    """Train `steps` steps of random batches. Ranks beyond the number of GPUs share them."""
    device = torch.device("cuda", rank % GPUS)
    torch.manual_seed(0)
    with zeroshard.Init(device=device):
        model = Llama(SHAPE)
    adamw = torch.optim.AdamW if case.bits == 32 else zeroshard.AdamW8bit
    optimizer = adamw(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = zeroshard.shard(model, optimizer, plan=case.recipe(), device=device)
    generator = torch.Generator().manual_seed(rank)
    # The processor can only begin when it knows the norm; all else must never wait for the device.
    waits = not case.watched or (case.offload is not None and case.offload.update is HostUpdate.PROCESSOR)
    losses: list[torch.Tensor] = []
    for step in range(steps):
        rows = [torch.randint(SHAPE.vocabulary, (BATCH, LENGTH + 1), generator=generator) for _ in range(case.micro)]
        batches = [row.to(device) for row in rows]
        torch.cuda.set_sync_debug_mode("error" if step >= 2 and not waits else "default")
        loss = torch.zeros(())
        for ids in batches:
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            (loss / case.micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        if case.drain:
            zeroshard.drain(model)
        torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach())
    whole = [value.detach().float().flatten().cpu() for _, value in zeroshard.iterate_full_parameters(model)]
    zeroshard.close(model)
    return Result([float(loss) for loss in losses], torch.cat(whole))


def on_gpu(rank: int) -> None:
    torch.cuda.set_device(rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // GPUS))


def same(got: Result, expected: Result, what: object) -> None:
    assert got.losses == expected.losses, f"{what}: {got.losses} against {expected.losses}"
    assert torch.equal(got.parameters, expected.parameters), what


def _stages(rank: int, world: int) -> None:
    on_gpu(rank)
    for micro, stages in ((1, (1, 2)), (2, (2,))):  # stage 1 sums micro-batches before ranks: other roundings in bf16
        expected = train(Case(3, micro), rank)
        for stage in stages:
            same(train(Case(stage, micro), rank), expected, f"stage {stage}, {micro} micro-batches")
        same(train(Case(3, micro, overlap=False), rank), expected, "nothing overlaps the step")
        assert expected.losses[-1] != expected.losses[0]


@pytest.mark.parametrize("world", sorted({1, GPUS}))
def test_stages_give_the_same_bits(world: int) -> None:
    run_ranks(world, _stages, backend=BACKEND, timeout=180)


STREAMED = Offload(1.0, update=HostUpdate.STREAMED, stream_numel=1 << 18)


def _streamed(rank: int, world: int) -> None:
    on_gpu(rank)
    for stage, micro in ((3, 1), (3, 2), (2, 1), (1, 2)):
        case = Case(stage, micro)
        expected = train(case, rank)
        for offload in (STREAMED, replace(STREAMED, ratio=0.5), replace(STREAMED, pin_memory=False)):
            same(train(replace(case, offload=offload), rank), expected, f"{case}, {offload}")
    for micro in (1, 2):  # parameters on the host are gathered by NCCL, whose sums round once more
        case = Case(3, micro, peer_copies=False)
        offload = replace(STREAMED, param=True)
        same(train(replace(case, offload=offload), rank), train(case, rank), f"{case}, {offload}")


@pytest.mark.parametrize("world", sorted({1, GPUS}))
def test_state_that_passes_through_the_gpu_gives_the_bits_of_state_that_stays(world: int) -> None:
    run_ranks(world, _streamed, backend=BACKEND, timeout=240)


def _in_codes(rank: int, world: int, folder: Path) -> None:
    use_beside()
    on_gpu(rank)
    away = Offload(1.0, stream_numel=1 << 18)
    disk = replace(away, tier=Tier.NVME, spill=Spill((str(folder),)), window_numel=1 << 17)
    places = (away, replace(away, ratio=0.5), replace(away, pin_memory=False), disk)
    for stage, micro in ((3, 1), (1, 2)):
        case = Case(stage, micro, watched=False, bits=8)
        expected = train(case, rank)
        for offload in (*places, replace(disk, ratio=0.8, host_ratio=0.4)):
            same(train(replace(case, offload=offload), rank), expected, f"{case}, {offload}")
    case = Case(3, watched=False, bits=8, peer_copies=False)
    same(train(replace(case, offload=replace(away, param=True)), rank), train(case, rank), "parameters too")


@needs_torchao
@pytest.mark.parametrize("world", sorted({1, GPUS}))
def test_moments_in_8_bits_give_the_same_bits_wherever_they_rest(world: int, tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(world, _in_codes, folder, backend=BACKEND, timeout=240)


def _by_processor(rank: int, world: int) -> None:
    on_gpu(rank)
    offload = Offload(1.0, update=HostUpdate.PROCESSOR)
    for stage, micro, param in ((3, 1, False), (2, 1, False), (3, 2, False), (3, 1, True), (3, 2, True)):
        case = Case(stage, micro, master="float32", peer_copies=False if param else None)
        away = replace(case, offload=replace(offload, param=param))
        what = f"stage {stage}, {micro} micro-batches, parameters too: {param}"
        # One step apart they differ in roundings alone; later Adam makes whole steps of the tiniest gradients.
        here, there = (train(one, rank, steps=1).parameters for one in (case, away))
        assert torch.allclose(there, here, rtol=1e-5, atol=1e-6), what
        on_device, beside = train(case, rank), train(away, rank)
        assert beside.losses == pytest.approx(on_device.losses, rel=1e-3), what
        for one in (replace(offload, param=param, pin_memory=False), replace(offload, param=param)):
            drained = train(replace(case, offload=one, drain=True), rank)
            same(drained, beside, f"{what}, nothing overlapped, pinned: {one.pin_memory}")
        if not param:
            half = train(replace(case, offload=replace(offload, ratio=0.5)), rank)
            assert half.losses == pytest.approx(on_device.losses, rel=1e-3), what


@pytest.mark.parametrize("world", sorted({1, GPUS}))
def test_state_that_the_processor_updates_stays_near_that_on_the_gpu(world: int) -> None:
    run_ranks(world, _by_processor, backend=BACKEND, timeout=240)

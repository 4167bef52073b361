"""On a GPU: writes past version counters are refused or followed as on a CPU, and no step waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.engine.core.changes import FIRST_NUMBERS
from zeroshard.engine.core.delayed_reads import DELAY
from zeroshard.errors import UsageError
from zeroshard.plan.builder import Precision
from zeroshard.plan.placement import STAGES
from zeroshard.plan.policy import HostUpdate

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
BACKEND = "cpu:gloo,cuda:nccl"
WIDTH, STEPS = 256, FIRST_NUMBERS + 2 * DELAY
Write = Callable[[nn.Parameter], object]


class _Block(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.write = write

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self.linear.weight)
        return torch.relu(self.linear(values))


def _train(
    rank: int, stage: int, write: Write, *, waits: bool = False, offload: zeroshard.Offload | None = None
) -> torch.Tensor:
    device = torch.device("cuda", rank % GPUS)
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(write) for _ in range(3)))
    precision = Precision(param="bfloat16", master="float32")
    recipe = zeroshard.Recipe(sharding=STAGES[stage], precision=precision, offload=offload)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=recipe, device=device)
    batch = torch.ones(4, WIDTH, device=device, dtype=torch.bfloat16)
    try:
        for step in range(STEPS):
            may_wait = waits or offload is not None or step == 0  # tables of kernels come first
            torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
            model(batch).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    whole = [value.detach().flatten().cpu() for _, value in zeroshard.iterate_full_parameters(model)]
    zeroshard.close(model)
    return torch.cat(whole)


def _follows(rank: int, world: int) -> None:
    for stage in (0, 1, 2):
        noted = _train(rank, stage, lambda weight: weight.clamp_(-0.02, 0.02), waits=True)
        unnoted = _train(rank, stage, lambda weight: weight.data.clamp_(-0.02, 0.02))
        assert torch.equal(noted, unnoted), stage


def _follows_off_device(rank: int, world: int) -> None:
    for stage in (1, 2):
        for update in HostUpdate:
            offload = zeroshard.Offload(update=update)
            noted = _train(rank, stage, lambda weight: weight.clamp_(-0.02, 0.02), offload=offload)
            unnoted = _train(rank, stage, lambda weight: weight.data.clamp_(-0.02, 0.02), offload=offload)
            assert torch.equal(noted, unnoted), (stage, update)


def _refuses(rank: int, world: int) -> None:
    with pytest.raises(UsageError, match="weight' was changed in place"):
        _train(rank, 3, lambda weight: weight.data.clamp_(-0.02, 0.02))
    assert torch.cuda.get_sync_debug_mode() == 0


def test_master_weights_follow_writes_on_whole_weights() -> None:
    run_ranks(1, _follows, backend=BACKEND, timeout=120)


def test_master_weights_in_host_memory_follow_writes_on_whole_weights() -> None:
    run_ranks(1, _follows_off_device, backend=BACKEND, timeout=120)


@pytest.mark.skipif(GPUS < 2, reason="needs GPUs over which parameters are sharded")
def test_writes_on_gathered_weights_are_refused_some_passes_later() -> None:
    run_ranks(2, _refuses, backend=BACKEND, timeout=120)

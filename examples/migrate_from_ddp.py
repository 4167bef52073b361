"""The same training under DDP and under zeroshard, compared: `zeroshard run --nproc 2 examples/migrate_from_ddp.py`."""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import zeroshard

if not dist.is_initialized():
    dist.init_process_group()
torch.manual_seed(0)
start = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
torch.manual_seed(1 + dist.get_rank())
batches = [torch.randn(8, 64) for _ in range(5)]


def with_ddp() -> dict[str, torch.Tensor]:
    model = DistributedDataParallel(copy.deepcopy(start))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module.state_dict()


def with_zeroshard() -> dict[str, torch.Tensor]:
    model = copy.deepcopy(start)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan=3)
    device = next(model.parameters()).device
    for x in batches:
        model(x.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = zeroshard.full_state_dict(model)
    zeroshard.close(model)
    return state


before, after = with_ddp(), with_zeroshard()
if dist.get_rank() == 0:
    worst = max(float((before[name] - after[name]).abs().max()) for name in before)
    print(f"largest difference after {len(batches)} steps: {worst:g}")
    assert worst <= 1e-6

"""The same training under FSDP2 and zeroshard, compared: `zeroshard run --nproc 2 examples/migrate_from_fsdp2.py`."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zeroshard

if not dist.is_initialized():
    dist.init_process_group()
torch.manual_seed(0)
start = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
torch.manual_seed(1 + dist.get_rank())
batches = [torch.randn(8, 64) for _ in range(5)]
CLIP = 0.5


def with_fsdp2() -> dict[str, torch.Tensor]:
    model = copy.deepcopy(start)
    mesh = dist.device_mesh.init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in batches:
        model(x.to(mesh.device_type)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() for name, p in model.state_dict().items() if isinstance(p, DTensor)}


def with_zeroshard() -> dict[str, torch.Tensor]:
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zeroshard.shard(model, optimizer, plan=3, clip_norm=CLIP)
    device = next(model.parameters()).device
    for x in batches:
        model(x.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = zeroshard.full_state_dict(model)
    zeroshard.close(model)
    return state


before, after = with_fsdp2(), with_zeroshard()
if dist.get_rank() == 0:
    worst = max(float((before[name].cpu() - after[name]).abs().max()) for name in before)
    print(f"largest difference after {len(batches)} steps: {worst:g}")
    assert worst <= 1e-5

"""The README's example in PyTorch's manner: `zeroshard run --nproc 2 examples/readme_native.py`."""

import torch

import zeroshard

torch.distributed.init_process_group()
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan=3)
device = next(model.parameters()).device
for _ in range(10):
    x = torch.randn(8, 256, device=device)
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"gradient norm {zeroshard.get_global_grad_norm(model):.4f}")

"""The README's example in DeepSpeed's manner: `zeroshard run --nproc 2 examples/readme_engine.py`."""

import torch

import zeroshard

model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine, _, _, _ = zeroshard.initialize(model=model, config=config)
for _ in range(10):
    x = torch.randn(8, 256, device=engine.device)
    loss = (engine(x) - x).square().mean()
    engine.backward(loss)
    engine.step()
print(f"loss {loss:.4f}, gradient norm {engine.get_global_grad_norm():.4f}")

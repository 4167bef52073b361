"""A DeepSpeed script after the move: `zeroshard run --nproc 2 examples/migrate_from_deepspeed.py`.

It was `import deepspeed`; the lines that changed say so. The config is what it was.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import zeroshard  # was: import deepspeed

CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-2, "cycle_first_step_size": 8},
    },
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": True},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", default=CONFIG)
    args, _ = parser.parse_known_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    x = torch.randn(256, 32)
    data = torch.utils.data.TensorDataset(x, x.flip(-1))

    # was: deepspeed.initialize(...)
    engine, _, loader, _ = zeroshard.initialize(args=args, model=model, training_data=data)
    assert loader is not None
    losses = []
    for _ in range(4):
        for given, wanted in loader:
            given, wanted = given.to(engine.device), wanted.to(engine.device)
            loss = (engine(given).float() - wanted).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    norm = engine.get_global_grad_norm()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {engine.global_steps} steps, gradient norm {norm:.3f}")
    assert losses[-1] < 0.8 * losses[0]

    weight = model[0].weight
    length = zeroshard.safe_get_full_fp32_param(weight).norm()  # was: deepspeed.utils.safe_get_full_fp32_param
    with zeroshard.GatheredParameters(weight):  # was: deepspeed.zero.GatheredParameters
        assert abs(weight.detach().float().norm() - length) < 0.1

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0], client_state={"epoch": 4})
    path, client_state = engine.load_checkpoint(folder[0])
    assert client_state == {"epoch": 4}
    assert path is not None
    assert Path(path).name == f"global_step{engine.global_steps}"
    engine.destroy()


main()

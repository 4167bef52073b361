"""Remake the DeepSpeed checkpoints of divided models: pipeline stages, experts, tensor-parallel ranks.

    DS_ACCELERATOR=cpu ds/bin/python tests/checkpoint/deepspeed/make_divided_fixtures.py

As `make_fixtures.py` beside it, with two, four or eight processes. Every rank tells the master weights and moments of
what it has; `truth.safetensors` holds them whole. `zeroshard` is not imported here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHECKPOINTS = HERE / "divided"
STEPS = 3
RANKS = {"pipeline": 4, "experts": 2, "experts_apart": 4, "experts_whole": 2, "tensors": 4, "stages_of_tensors": 8}
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 1000000,
}


def pipeline() -> tuple[Any, Any, Any]:
    """Six layers over two stages, the embedding tied with the head; three steps of `train_batch`."""
    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from torch import nn

    def head(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, embedding.weight)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(5)
    model = PipelineModule(
        [
            TiedLayerSpec("embedding", nn.Embedding, 13, 7),
            LayerSpec(nn.Linear, 7, 9),
            LayerSpec(nn.Tanh),
            LayerSpec(nn.Linear, 9, 7),
            LayerSpec(nn.LayerNorm, 7),
            TiedLayerSpec("embedding", nn.Embedding, 13, 7, forward_fn=head),
        ],
        num_stages=2,
        loss_fn=loss,
        seed_layers=True,
        partition_method="uniform",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    config = {**BASE, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(100 + engine.grid.get_data_parallel_id())

    def data() -> Any:
        while True:
            tokens = torch.randint(0, 13, (2, 6), generator=generator)
            yield tokens, tokens.roll(1, 1)

    batches = data()
    for _ in range(STEPS):
        engine.train_batch(batches)
    return engine, optimizer, model


def experts(ep: int) -> tuple[Any, Any, Any]:
    """A layer of four experts over `ep` ranks, between two dense ones."""
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from torch import nn

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 8)
            expert = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))
            self.moe = MoE(8, expert, num_experts=4, ep_size=ep, k=1, min_capacity=4)
            self.head = nn.Linear(8, 13, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x, auxiliary, _ = self.moe(self.embed(tokens))
            logits = self.head(x)
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()) + 0.01 * auxiliary

    torch.manual_seed(5)
    model = Tiny()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    config = {**BASE, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(100 + engine.global_rank)
    for _ in range(STEPS):
        loss = engine(torch.randint(0, 13, (2, 6), generator=generator))
        engine.backward(loss)
        engine.step()
    return engine, optimizer, model


def tensors() -> tuple[Any, Any, Any]:
    """A Llama that DeepSpeed divides by its own rules for it (AutoTP), over two ranks beside two of data."""
    import deepspeed
    import torch
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config)
    settings = {
        **BASE,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": True}},
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=settings)
    generator = torch.Generator().manual_seed(100 + engine.global_rank // 2)
    for _ in range(STEPS):
        tokens = torch.randint(0, 32, (2, 6), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    return engine, optimizer, model


def make(case: str, folder: Path) -> None:
    """One rank of one case."""
    import deepspeed
    import torch

    deepspeed.init_distributed(dist_backend="gloo")
    client: dict[str, Any] = {"epoch": 2}
    if case == "pipeline":
        engine, optimizer, model = pipeline()
    elif case == "tensors":
        engine, optimizer, model = tensors()
    elif case == "stages_of_tensors":
        from stages_of_tensors import INFO, train

        engine, optimizer, model = train(BASE, STEPS)
        client[INFO[0]] = INFO[1]
    else:
        engine, optimizer, model = experts(1 if case == "experts_whole" else 2)
    engine.save_checkpoint(str(folder), tag="step3", client_state=client)
    told = _told(optimizer, model)
    if case in ("tensors", "stages_of_tensors"):  # what each of the two ranks has
        told = {f"{name}|{engine.global_rank % 2}": value for name, value in told.items()}
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, told)
    if torch.distributed.get_rank() == 0:
        from safetensors.torch import save_file

        whole: dict[str, torch.Tensor] = {}
        for rank in every:
            whole |= rank
        save_file({name: value.contiguous() for name, value in whole.items()}, folder / "truth.safetensors")
        facts = {"steps": engine.global_steps, "samples": engine.global_samples}
        (folder / "truth.json").write_text(json.dumps(facts, indent=1) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _told(optimizer: Any, model: Any) -> dict[str, Any]:
    """Master weights and moments of this rank's parameters, experts by their number among all."""
    from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in model.named_parameters():
        shown, mark = name, "deepspeed_experts."
        if mark in name:
            head, rest = name.split(mark)
            local, tail = rest.split(".", 1)
            count = 4 // groups._get_expert_parallel_world_size(parameter.group_name)
            first = groups._get_expert_parallel_rank(parameter.group_name) * count
            shown = f"{head}{mark}{first + int(local)}.{tail}"
        found[f"{shown}|fp32"] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{shown}|{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


def launch(case: str) -> None:
    folder = CHECKPOINTS / case
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ranks = []
    for rank in range(RANKS[case]):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS[case])}
        fixed = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29714"}
        environment = {**os.environ, **fixed, **place, "LOCAL_WORLD_SIZE": str(RANKS[case])}
        ranks.append(subprocess.Popen([sys.executable, __file__, "rank", case, str(folder)], env=environment))
    if any(process.wait() for process in ranks):
        raise SystemExit(f"{case} failed")
    for script in folder.glob("zero_to_*.py"):
        script.unlink()


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        make(sys.argv[2], Path(sys.argv[3]))
        return
    for case in sys.argv[1:] or RANKS:
        launch(case)


if __name__ == "__main__":
    main()

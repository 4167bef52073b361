"""Unchanged scripts for Trainer and Accelerate on two ranks: the numbers of plain DDP, and everything around training.

The runs here are those of ZeRO-3, where the most can go wrong. `ZEROSHARD_HF_TESTS=1` adds all stages and settings
(test_matrix.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat import tiny
from tests.support.distributed import run_ranks
from tests.support.installed import need

pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")
need("accelerate", "peft", "transformers")

CLOSE = 2e-5


def _pretrained(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _generated(model: Any, rank: int) -> list[int]:
    """Greedy tokens after a prompt; the ranks stop after different numbers of them."""
    prompt = torch.tensor([[5 + rank, 9, 11]])
    length = 4 + 5 * rank
    with torch.no_grad():
        return model.generate(prompt, max_new_tokens=length, do_sample=False, eos_token_id=None)[0].tolist()


def _trainer_at_stage_3(rank: int, world: int, base: str) -> None:
    """Loaded shard by shard, trained, evaluated, saved, resumed, exported: as DDP does it."""
    start = tiny.shared_folder(base, "start")
    if rank == 0:
        tiny.model("llama").save_pretrained(start)
        tiny.tokenizer().save_pretrained(start)
    dist.barrier()
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {"load_best_model_at_end": True, "save_total_limit": 2}
    plain = tiny.trainer(tiny.arguments(tiny.shared_folder(base, "ddp"), None, {}, **settings), _pretrained(start))
    plain.train()
    expected, tokens = tiny.logged(plain), _generated(plain.model, rank)
    plain.save_model(str(tiny.shared_folder(base, "ddp-model")))
    tiny.forget()

    arguments = tiny.arguments(tiny.shared_folder(base, "zero"), 3, {}, **settings)
    model = _pretrained(start)
    assert {parameter.numel() for parameter in model.parameters()} == {0}
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    run = tiny.trainer(arguments, model)
    run.train()
    trained = tiny.logged(run)
    assert trained.largest_gap(expected) < CLOSE
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
    assert abs(run.evaluate()["eval_loss"] - expected.evaluations[-1]) < CLOSE
    assert _generated(model, rank) == tokens
    assert {parameter.numel() for parameter in model.parameters()} == {0}
    run.save_model(str(tiny.shared_folder(base, "zero-model")))
    dist.barrier()
    if rank == 0:
        saved, wanted = _weights(Path(base, "zero-model")), _weights(Path(base, "ddp-model"))
        assert saved.keys() == wanted.keys()
        assert all(torch.allclose(saved[name], wanted[name], atol=1e-5) for name in wanted)
    run.model_wrapped.destroy()
    tiny.forget()

    checkpoint = Path(base, "zero", "checkpoint-2")
    assert (checkpoint / "global_step2").is_dir()
    resumed = tiny.trainer(tiny.arguments(tiny.shared_folder(base, "again"), 3, {}, **settings), _pretrained(start))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert tiny.logged(resumed).largest_gap(trained) == 0.0  # the history came with the checkpoint
    resumed.model_wrapped.destroy()
    tiny.forget()


def _accelerate_at_stage_3(rank: int, world: int, base: str) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    rows = torch.randint(0, 128, (16, 9), generator=torch.Generator().manual_seed(1))
    gloo = InitProcessGroupKwargs(backend="gloo")

    def start(plugin: DeepSpeedPlugin | None) -> tuple[Any, ...]:
        options: dict[str, Any] = {"cpu": True} if plugin is None else {"deepspeed_plugin": plugin}
        model = tiny.model("gpt2")  # with an Accelerator it would be built sharded, by other random numbers
        accelerator = Accelerator(gradient_accumulation_steps=2, kwargs_handlers=[gloo], **options)
        loader = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
        # Of key biases the gradient is rounding noise, which a smaller epsilon lets AdamW inflate.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
        return (accelerator, *accelerator.prepare(model, optimizer, loader))

    accelerator, model, optimizer, loader = start(None)
    assert accelerator.num_processes == world
    expected = tiny.accelerate_loop(accelerator, model, optimizer, loader, 2)
    weights = {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    tiny.forget()

    plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0, gradient_accumulation_steps=2, zero3_init_flag=False)
    plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    accelerator, model, optimizer, loader = start(plugin)
    assert accelerator.num_processes == world
    assert accelerator.distributed_type.value == "DEEPSPEED"
    numbers = tiny.accelerate_loop(accelerator, model, optimizer, loader)
    accelerator.save_state(str(tiny.shared_folder(base, "state")))
    numbers += tiny.accelerate_loop(accelerator, model, optimizer, loader)
    assert max(abs(a - b) for a, b in zip(numbers, expected, strict=True)) < CLOSE, (numbers, expected)
    state = accelerator.get_state_dict(model)
    assert (state is None) == (rank != 0)
    if state is not None:
        assert state.keys() == weights.keys()
        assert all(torch.allclose(state[name], weights[name], atol=1e-5) for name in weights)
    accelerator.load_state(str(Path(base, "state")))
    assert tiny.accelerate_loop(accelerator, model, optimizer, loader) == numbers[len(numbers) // 2 :]
    assert type(accelerator.unwrap_model(model)).__name__ == "GPT2LMHeadModel"
    accelerator.free_memory()
    tiny.forget()


def _everything(rank: int, world: int, base: str) -> None:
    _trainer_at_stage_3(rank, world, base)
    _accelerate_at_stage_3(rank, world, base)


def test_trainer_and_accelerate_at_stage_3_train_as_under_ddp(tmp_path: Path) -> None:
    run_ranks(2, _everything, str(tmp_path))

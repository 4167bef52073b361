"""Quantized models of Hugging Face's libraries with adapters, against one process: `ZEROSHARD_HF_TESTS=1`.

Each library is asked on the processor; with `-s` each prints a line: the largest gap of any loss to one process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat import tiny
from tests.support.distributed import run_ranks
from tests.support.installed import need

need("transformers", "peft")
pytestmark = [
    pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1"),
    pytest.mark.timeout(900),
]
STEPS = 4


def _bitsandbytes(**options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


def _torchao(name: str) -> Any:
    import torchao.quantization as quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, name)())


def _hqq(**options: Any) -> Any:
    from transformers import HqqConfig

    return HqqConfig(nbits=4, group_size=64, **options)


CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "nf4": ("bitsandbytes", lambda: _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "nf4, double": (
        "bitsandbytes",
        lambda: _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    ),
    "int8": ("bitsandbytes", lambda: _bitsandbytes(load_in_8bit=True)),
    "torchao int8": ("torchao", lambda: _torchao("Int8WeightOnlyConfig")),
    "hqq": ("hqq", _hqq),
}


def _loaded(folder: Path, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    config = CONFIGS[name][1]()
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )


def _adapted(folder: Path, name: str, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model = _loaded(folder, name)
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **options)
    return get_peft_model(model, config).train()


def _batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 90, (2, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _alone(folder: Path, name: str, world: int, **options: Any) -> list[float]:
    """Losses of rank 0's batches in one process that sees all batches."""
    model = _adapted(folder, name, **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses: list[float] = []
    for step in range(STEPS):
        found = [model(**_batch(step, rank)).loss for rank in range(world)]
        torch.stack(found).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found[0].detach()))
    return losses


def _config(stage: int) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    return {**given, "optimizer": optimizer, "zero_optimization": zero}


def _trains(rank: int, world: int, folder: Path, name: str, options: dict[str, Any]) -> float:
    import zeroshard

    warnings.simplefilter("ignore")
    expected = _alone(folder, name, world, **options)
    gap = 0.0
    for stage in range(4):
        model = _adapted(folder, name, **options)
        engine, *_ = zeroshard.initialize(model=model, config=_config(stage))
        for step in range(STEPS):
            loss = engine(**_batch(step, rank)).loss
            engine.backward(loss)
            engine.step()
            if rank == 0:
                gap = max(gap, abs(float(loss.detach()) - expected[step]))
        engine.destroy()
    return gap


def _saves(rank: int, world: int, base: str, folder: Path, name: str) -> None:
    """Loaded in parts, trained, its adapter saved and read again, merged, saved, and opened by transformers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    import zeroshard

    warnings.simplefilter("ignore")
    expected = _alone(folder, name, world)
    with zeroshard.QuantizedInit():
        model = _adapted(folder, name)
    engine, *_ = zeroshard.initialize(model=model, config=_config(3))
    for step in range(STEPS):
        loss = engine(**_batch(step, rank)).loss
        engine.backward(loss)
        engine.step()
        assert rank or abs(float(loss.detach()) - expected[step]) < 1e-5
    with torch.no_grad():
        trained = engine(**_batch(9, 0)).logits
    with pytest.raises(zeroshard.errors.ZeroShardError, match="GatheredParameters"):
        model.merge_and_unload()
    adapter, whole = Path(base, "adapter"), Path(base, "merged")
    with zeroshard.GatheredParameters(list(model.parameters())):
        if rank == 0:
            model.save_pretrained(adapter)
        merged = model.merge_and_unload()
        with torch.no_grad():
            inside = merged(**_batch(9, 0)).logits
        if rank == 0:
            merged.save_pretrained(whole)
    dist.barrier()
    if rank == 0:
        again = PeftModel.from_pretrained(_loaded(folder, name), adapter).train()
        with torch.no_grad():
            assert torch.allclose(again(**_batch(9, 0)).logits, trained, atol=1e-5)
            opened = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32, device_map={"": "cpu"})
            opened.train()  # bitsandbytes computes otherwise in evaluation
            assert torch.allclose(opened(**_batch(9, 0)).logits, inside, atol=1e-4)
    dist.barrier()


def _fine_tunes(rank: int, world: int, base: str, folder: Path, name: str) -> None:
    """TRL's SFT of a quantized base, as under DDP or at stage 0."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    warnings.simplefilter("ignore")

    def losses(stage: int | None) -> list[float]:
        settings: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1}
        settings |= {"use_cpu": True, "bf16": False, "save_strategy": "no", "gradient_checkpointing": False}
        settings |= {"report_to": [], "learning_rate": 1e-2}
        config = None if stage is None else tiny.ds_config(stage)
        run = trl.SFTTrainer(
            _loaded(folder, name),
            args=trl.SFTConfig(str(Path(base, f"{stage}")), deepspeed=config, **settings),
            train_dataset=Dataset.from_list([{"text": text} for text in tiny.SENTENCES[:32]]),
            processing_class=tiny.tokenizer(),
            peft_config=LoraConfig(r=4, target_modules="all-linear"),
        )
        run.train()
        found = tiny.logged(run).losses
        tiny.forget()
        return found

    # torch's DDP can't hold torchao's tensors. TRL has the adapters in bfloat16, which DDP rounds in each step.
    expected = losses(0 if "torchao" in name else None)
    for stage in (2, 3):
        assert losses(stage) == pytest.approx(expected, abs=1e-5 if "torchao" in name else 5e-4), stage


def _optimizers(rank: int, world: int, base: str, folder: Path) -> None:
    """The 8-bit optimizers of Trainer by their names, at two stages: the same bits, and near those in 32 bits."""
    from transformers import AutoModelForCausalLM

    def losses(name: str, stage: int | None) -> list[float]:
        made = tiny.arguments(Path(base, f"{name}-{stage}"), stage, {}, eval_strategy="no", optim=name)
        run = tiny.trainer(made, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        run.train()
        found = tiny.logged(run).losses
        tiny.forget()
        return found

    exact = losses("adamw_torch", 2)
    for name in ("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"):
        if name == "adamw_torch_8bit" and find_spec("torchao") is None:
            continue
        found = [losses(name, stage) for stage in (0, 1, 2, 3)]
        assert all(other == found[0] for other in found[1:]), name
        assert found[0] == pytest.approx(exact, abs=2e-2), name
        assert found[0] != exact, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("base")
    config = tiny.model_config("llama")
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 32
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_quantized_base_with_adapters_trains_as_in_one_process(name: str, folder: Path) -> None:
    need(CONFIGS[name][0])
    gap = max(run_ranks(2, _trains, folder, name, {}, timeout=600))
    print(f"{name}: {gap:.1e}")
    assert gap < 1e-5


@pytest.mark.parametrize("name", ["nf4, double", "int8", "torchao int8"])
def test_a_trained_base_is_saved_merged_and_opened_by_transformers(name: str, folder: Path, tmp_path: Path) -> None:
    need(CONFIGS[name][0])
    run_ranks(2, _saves, str(tmp_path), folder, name, timeout=600)


@pytest.mark.parametrize("name", ["nf4", "int8", "torchao int8"])
def test_trl_fine_tunes_a_quantized_base_as_under_ddp(name: str, folder: Path, tmp_path: Path) -> None:
    need(CONFIGS[name][0], "trl", "deepspeed")
    run_ranks(2, _fine_tunes, str(tmp_path), folder, name, timeout=600)


def test_8_bit_optimizers_by_their_names_in_trainer(folder: Path, tmp_path: Path) -> None:
    need("bitsandbytes", "deepspeed")
    run_ranks(2, _optimizers, str(tmp_path), folder, timeout=600)

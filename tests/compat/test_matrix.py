"""Settings of Trainer, Accelerate and peft at all stages against plain DDP. It takes minutes: `ZEROSHARD_HF_TESTS=1`.

With `-s` each run prints a line: the largest gap of any logged loss or norm to the same script under DDP.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
pytestmark = [
    pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1"),
    pytest.mark.timeout(900),
]
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
PLAIN_CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


@dataclass(frozen=True)
class Setting:
    """One column of the table.

    Attributes:
        arguments: for TrainingArguments.
        config: keys beside those of `tiny.ds_config`.
        reference: arguments that differ under DDP, which can't do all of it.
        loads: read the model with from_pretrained, under ZeRO-3 shard by shard.
        lora: train adapters; `modules` are trained whole beside them.
        tolerance: of losses and norms.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "llama"
    loads: bool = False
    lora: bool = False
    modules: tuple[str, ...] = ()
    tolerance: float = 2e-6


OPTIMIZER = {"optimizer": tiny.AUTO_OPTIMIZER}
PERSISTENT = {"zero_optimization": {"stage3_param_persistence_threshold": "auto"}}
SETTINGS: Mapping[str, Setting] = {
    "optimizer and schedule of Trainer": Setting(),
    "optimizer of the config": Setting(config=OPTIMIZER),
    "small parameters stay gathered": Setting(config=PERSISTENT),
    "accumulation": Setting({"gradient_accumulation_steps": 2}),
    "accumulation and clipping": Setting({"gradient_accumulation_steps": 4, "max_grad_norm": 0.1}, OPTIMIZER),
    "tied weights": Setting({"gradient_accumulation_steps": 2}, kind="gpt2"),
    "checkpointing": Setting(PLAIN_CHECKPOINTING),
    "reentrant checkpointing": Setting(REENTRANT),
    "from_pretrained": Setting(loads=True),
    "from_pretrained, tied": Setting(config=OPTIMIZER, kind="gpt2", loads=True),
    "LoRA": Setting(lora=True, loads=True),
    "LoRA, tied, accumulation": Setting({"gradient_accumulation_steps": 2}, kind="gpt2", lora=True),
    "LoRA, reentrant checkpointing": Setting(REENTRANT, reference=PLAIN_CHECKPOINTING, lora=True, loads=True),
    "LoRA, whole modules": Setting(lora=True, loads=True, modules=("lm_head",)),
    "bf16": Setting({"bf16": True}, tolerance=0.2),
}


def _adapted(model: Any, setting: Setting) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = ["c_attn"] if setting.kind == "gpt2" else ["q_proj", "v_proj"]
    torch.manual_seed(7)
    config = LoraConfig(
        r=4, target_modules=targets, task_type="CAUSAL_LM", modules_to_save=list(setting.modules) or None
    )
    if setting.arguments.get("gradient_checkpointing"):
        model.enable_input_require_grads()
    return get_peft_model(model, config)


def _train(name: str, setting: Setting, stage: int | None, base: str) -> tiny.Run:
    folder = Path(base, f"{list(SETTINGS).index(name)}-{stage}")
    changes = {**setting.arguments, **(setting.reference if stage is None else {})}
    model = None if setting.loads else tiny.model(setting.kind)
    config = dict(setting.config)
    if "zero_optimization" in config:
        config["zero_optimization"] = {"stage": stage, **config["zero_optimization"]}
    arguments = tiny.arguments(folder, stage, config, **changes)
    if model is None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(Path(base, setting.kind), dtype="float32")
        sharded = {parameter.numel() for parameter in model.parameters()} == {0}
        assert sharded == (stage == 3)
    if setting.lora:
        model = _adapted(model, setting)
    run = tiny.trainer(arguments, model)
    run.train()
    if stage is not None:
        assert type(run.model_wrapped).__name__ == "DeepSpeedEngine"
        assert run.model_wrapped.zero_optimization_stage() == stage
        run.model_wrapped.destroy()
    tiny.forget()
    return tiny.logged(run)


def _table(rank: int, world: int, base: str) -> None:
    if rank == 0:
        for kind in ("llama", "gpt2"):
            tiny.model(kind).save_pretrained(Path(base, kind))
    dist.barrier()
    for name, setting in SETTINGS.items():
        expected = _train(name, setting, None, base)
        gaps = [_train(name, setting, stage, base).largest_gap(expected) for stage in range(4)]
        if rank == 0:
            print(f"{name:36}", *(f"{gap:9.1e}" for gap in gaps), f"  last loss {expected.losses[-1]:.4f}", flush=True)
        assert max(gaps) < setting.tolerance, (name, gaps)


def test_all_settings_at_all_stages_train_as_under_ddp(tmp_path: Path) -> None:
    run_ranks(2, _table, str(tmp_path), timeout=800.0)


# Around training.


def _save(rank: int, world: int, base: str, stage: int) -> list[float]:
    arguments = tiny.arguments(Path(base, "run"), stage, {}, save_strategy="steps", save_steps=2)
    run = tiny.trainer(arguments, tiny.model())
    run.train()
    return tiny.logged(run).losses


def _resume(rank: int, world: int, base: str, stage: int, name: str) -> list[float]:
    arguments = tiny.arguments(Path(base, name), stage, {}, per_device_train_batch_size=4 // world)
    run = tiny.trainer(arguments, tiny.model(seed=9))
    run.train(resume_from_checkpoint=str(Path(base, "run", "checkpoint-2")))
    return tiny.logged(run).losses


@pytest.mark.parametrize("stage", [1, 3])
def test_resumes_at_another_world_size_and_stage(tmp_path: Path, stage: int) -> None:
    expected = run_ranks(2, _save, str(tmp_path), stage)[0]
    for world, other in ((2, stage), (1, stage), (2, 4 - stage), (1, 0)):
        found = run_ranks(world, _resume, str(tmp_path), other, f"{world}-{other}")[0]
        assert found == pytest.approx(expected, abs=2e-5), (world, other)


def _initialised_like_a_plain_build(rank: int, world: int, base: str) -> None:
    """from_config under ZeRO-3 with HfDeepSpeedConfig alone; then other embeddings, and an engine."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    built = {kind: dict(tiny.model(kind).named_parameters()) for kind in ("llama", "gpt2")}
    alive = HfDeepSpeedConfig(tiny.ds_config(3))
    for kind, plain in built.items():
        model = tiny.model(kind)
        assert {parameter.numel() for parameter in model.parameters()} == {0}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        with deepspeed.zero.GatheredParameters(model.parameters()):
            for name, parameter in model.named_parameters():
                assert parameter.shape == plain[name].shape
                if plain[name].dim() == 2:
                    assert 0.5 < float(parameter.std() / plain[name].std()) < 2.0, name
            both = [torch.empty_like(parameter) for parameter in model.parameters()]
            for mine, other in zip(model.parameters(), both, strict=True):
                other.copy_(mine.detach())
                dist.broadcast(other, 0)
                assert torch.equal(other, mine)
        if kind == "gpt2":
            assert model.lm_head.weight is model.transformer.wte.weight
        model.resize_token_embeddings(160)
        engine, *_ = deepspeed.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
            },
        )
        tokens = torch.randint(0, 160, (2, 9), generator=torch.Generator().manual_seed(rank))
        before = float(engine(input_ids=tokens, labels=tokens).loss)
        for _ in range(4):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        assert float(engine(input_ids=tokens, labels=tokens).loss.detach()) < before
        engine.destroy()
    del alive
    tiny.forget()


def _evaluates_only(rank: int, world: int, base: str) -> None:
    expected = tiny.trainer(tiny.arguments(Path(base, "a"), None, {}), tiny.model()).evaluate()["eval_loss"]
    tiny.forget()
    subject = tiny.model()
    config = {**OPTIMIZER, "scheduler": tiny.AUTO_SCHEDULER}
    run = tiny.trainer(tiny.arguments(Path(base, "b"), 3, config), subject)
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-6)
    tiny.forget()


def _everything_else(rank: int, world: int, base: str) -> None:
    checks: tuple[Callable[[int, int, str], None], ...] = (_initialised_like_a_plain_build, _evaluates_only)
    for check in checks:
        check(rank, world, base)


def test_builds_sharded_and_evaluates_alone(tmp_path: Path) -> None:
    run_ranks(2, _everything_else, str(tmp_path), timeout=300.0)


def _trl_losses(kind: str, stage: int | None, base: str) -> list[float]:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    texts = tiny.SENTENCES
    columns = {
        "SFT": {"text": texts},
        "DPO": {"prompt": texts, "chosen": texts[::-1], "rejected": [*texts[3:], *texts[:3]]},
        "GRPO": {"prompt": texts},
    }
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "report_to": []}
    settings |= {"use_cpu": True, "bf16": False, "save_strategy": "no", "gradient_checkpointing": False}
    settings |= {"learning_rate": 1e-2, "deepspeed": None if stage is None else tiny.ds_config(stage)}
    settings |= {"num_generations": 2, "max_completion_length": 8} if kind == "GRPO" else {}
    arguments = getattr(trl, f"{kind}Config")(str(Path(base, f"{kind}-{stage}")), **settings)
    more: dict[str, Any] = {}
    if kind == "GRPO":
        more["reward_funcs"] = lambda completions, **_: [float(len(set(text))) for text in completions]
    model = AutoModelForCausalLM.from_pretrained(Path(base, "llama"), dtype="float32")
    if kind == "DPO":
        more["ref_model"] = AutoModelForCausalLM.from_pretrained(Path(base, "llama"), dtype="float32")
    run = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=arguments,
        processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_dict(columns[kind]),
        **more,
    )
    run.train()
    tiny.forget()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def _trl(rank: int, world: int, base: str) -> None:
    if rank == 0:
        tiny.model().save_pretrained(Path(base, "llama"))
    dist.barrier()
    for kind in ("SFT", "DPO", "GRPO"):
        expected = _trl_losses(kind, None, base)
        for stage in (2, 3):
            assert _trl_losses(kind, stage, base) == pytest.approx(expected, abs=1e-5), (kind, stage)


def test_trl_trains_as_under_ddp(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    run_ranks(2, _trl, str(tmp_path), timeout=400.0)


EXAMPLES = Path(__file__).parents[2] / "examples"
USUAL = (
    *("--bf16", "true", "--num_train_epochs", "1", "--per_device_train_batch_size", "1", "--learning_rate", "2e-5"),
    *("--warmup_ratio", "0.03", "--lr_scheduler_type", "cosine", "--logging_steps", "2"),
    *("--save_strategy", "steps", "--save_steps", "4", "--use_cpu", "true"),
)


def _run_example(folder: Path, config: Path, *arguments: str) -> None:
    tiny.model().save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    rows = [{"instruction": text, "input": "", "output": text[::-1]} for text in tiny.SENTENCES]
    (folder / "rows.json").write_text(json.dumps(rows))
    command = [sys.executable, "-m", "deepspeed.launcher", "--num_gpus=2", str(EXAMPLES / "sft.py")]
    command += ["--deepspeed", str(config), "--model_name_or_path", "./model", "--dataset_name", "rows.json"]
    command += ["--output_dir", "out", *USUAL, *arguments]
    subprocess.run(command, cwd=folder, env=tiny.environment(), check=True)
    assert (folder / "out" / "model.safetensors").is_file()


def test_the_example_runs_with_the_config_beside_it(tmp_path: Path) -> None:
    _run_example(tmp_path, EXAMPLES / "configs" / "zero3.json", "--max_steps", "2")


def test_the_example_takes_the_usual_command_line_and_its_checkpoint_becomes_fp32_weights(tmp_path: Path) -> None:
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "sub_group_size": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 1,
        "wall_clock_breakdown": False,
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    _run_example(tmp_path, tmp_path / "ds.json")
    folder = tmp_path / "out" / "checkpoint-8"
    subprocess.run([sys.executable, "zero_to_fp32.py", ".", "fp32"], cwd=folder, env=tiny.environment(), check=True)
    assert list((folder / "fp32").glob("pytorch_model*.bin"))

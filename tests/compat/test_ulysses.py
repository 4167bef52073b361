"""Unchanged scripts for accelerate and Trainer with `sp_size`: the losses and norms of one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat import tiny
from tests.support.distributed import run_ranks
from tests.support.installed import need

pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")
need("accelerate", "transformers")
more = pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")

CLOSE = 2e-6
Rows = list[dict[str, torch.Tensor]]


def _rows() -> Rows:
    return [{"input_ids": ids} for ids in torch.randint(0, 96, (8, 14), generator=torch.Generator().manual_seed(3))]


def _collate(batch: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A packed batch, of which the first tokens have no labels."""
    ids = torch.stack([row["input_ids"] for row in batch])
    labels = ids.clone()
    labels[:, :4] = -100
    positions = torch.cat([torch.arange(5), torch.arange(ids.shape[1] - 5)])
    return {"input_ids": ids, "labels": labels, "position_ids": positions.expand(len(batch), -1)}


def _parallelism(size: int) -> Any:
    from accelerate.utils import ParallelismConfig
    from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_backend="deepspeed", sp_size=size, sp_handler=handler)


def _wanted(rows: Rows) -> list[float]:
    model = tiny.model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    found = []
    for number, row in enumerate(rows):
        loss = model(**_collate([row])).loss
        (loss / 2).backward()
        found.append(float(loss.detach()))
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found


def _accelerated(rank: int, world: int) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from deepspeed.utils import groups

    expected = _wanted(_rows())  # before there is an Accelerator, with which models are built sharded
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0, gradient_accumulation_steps=2, zero3_init_flag=False)
    model = tiny.model("llama")
    accelerator = Accelerator(
        parallelism_config=_parallelism(2),
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=2,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    loader: Any = torch.utils.data.DataLoader(_rows(), batch_size=1, collate_fn=_collate)  # type: ignore[arg-type]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert len(loader) == 8
    plain, group = accelerator.unwrap_model(model), groups._get_sequence_parallel_group()
    losses, synced = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            labels = batch["shift_labels"]
            logits = model(**batch).logits
            own = plain.loss_function(
                logits=logits, labels=None, shift_labels=labels, vocab_size=plain.config.vocab_size
            )
            gather = torch.distributed.nn.functional.all_gather
            means, counts = gather(own, group=group), gather((labels != -100).sum(), group=group)
            weighted = [mean * count for mean, count in zip(means, counts, strict=True) if count > 0]
            loss = torch.stack(weighted).sum() / sum(counts)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            synced.append(accelerator.sync_gradients)
    assert synced == [False, True] * 4
    for found, wanted in zip(losses, expected, strict=True):
        assert abs(found - wanted) < CLOSE


def test_an_accelerate_script_trains_as_one_process_does() -> None:
    run_ranks(2, _accelerated)


def _trained(rank: int, world: int, base: str) -> tiny.Run:
    from transformers import Trainer

    more: dict[str, Any] = {"parallelism_config": _parallelism(world)} if world > 1 else {}
    arguments = tiny.arguments(
        tiny.shared_folder(base, str(world)),
        2 if world > 1 else None,
        {},
        per_device_train_batch_size=1,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        adam_epsilon=1e-6,
        learning_rate=1e-3,
        remove_unused_columns=False,
        **more,
    )
    rows: Any = _rows()
    run = Trainer(
        model=tiny.model("llama"), args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=_collate
    )
    run.train()
    return tiny.logged(run)


def _goes_on(rank: int, world: int, base: str) -> None:
    """Amid the second epoch, in another order than the first."""
    from transformers import Trainer

    def made() -> Any:
        arguments = tiny.arguments(
            tiny.shared_folder(base, "saved"),
            3,
            {},
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            max_steps=7,
            save_strategy="steps",
            save_steps=5,
            eval_strategy="no",
            remove_unused_columns=False,
            parallelism_config=_parallelism(world),
        )
        rows: Any = _rows()
        return Trainer(model=tiny.model("llama"), args=arguments, train_dataset=rows, data_collator=_collate)

    whole = made()
    whole.train()
    wanted = tiny.logged(whole)
    whole.model_wrapped.destroy()
    tiny.forget()
    resumed = made()
    resumed.train(resume_from_checkpoint=str(Path(base, "saved", "checkpoint-5")))
    assert tiny.logged(resumed).largest_gap(wanted) < 1e-6


@more
def test_trainer_goes_on_amid_an_epoch(tmp_path: Path) -> None:
    run_ranks(2, _goes_on, str(tmp_path))


@more
def test_trainer_trains_and_evaluates_as_one_process_does(tmp_path: Path) -> None:
    wanted = run_ranks(1, _trained, str(tmp_path))[0]
    for found in run_ranks(2, _trained, str(tmp_path)):
        assert found.largest_gap(wanted) < 2e-5

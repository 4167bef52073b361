"""Trainer and accelerate with models that are divided over `tp`, alone and beside data: the numbers of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from tests.compat import tiny
from tests.support.distributed import run_ranks
from zeroshard.errors import PlanError, UsageError
from zeroshard.sharding.dtensors import ranks_of_axis

pytestmark = pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")
TRAINING: dict[str, Any] = {"adam_epsilon": 1e-6, "learning_rate": 1e-3, "max_grad_norm": 0.5}


def _save_start(base: str) -> None:
    tiny.model("llama").save_pretrained(tiny.shared_folder(base, "start"))


def _by_trainer(rank: int, world: int, base: str, way: str, stage: int, data: int) -> tiny.Run:
    """A script for Trainer; without `way` one process with the batches of all data ranks."""
    from accelerate import ParallelismConfig

    changes: dict[str, Any] = dict(TRAINING)
    config: dict[str, Any] = {}
    if not way:
        _save_start(base)
        changes |= {"per_device_train_batch_size": 2 * data, "per_device_eval_batch_size": 3 * data}
    elif way == "autotp_size":
        config = {"tensor_parallel": {"autotp_size": world // data}}
    else:
        changes["parallelism_config"] = ParallelismConfig(tp_size=world // data, dp_shard_size=data)
    arguments = tiny.arguments(Path(base, "run"), stage if way else None, config, **changes)
    run = tiny.trainer(arguments, tiny.pretrained(base, divided=False), eval_dataset=tiny.samples(12))
    run.train()
    assert ranks_of_axis(run.model, "tp") == (world // data if way else 1)
    run.save_model(str(tiny.shared_folder(base, "end" if way else "wanted")))
    return tiny.logged(run)


@pytest.mark.parametrize(
    ("way", "data", "stage"),
    [("autotp_size", 2, 1), ("parallelism_config", 1, 2), ("parallelism_config", 2, 1), ("parallelism_config", 2, 3)],
)
def test_trainer_divides_a_model_over_tp_beside_data(way: str, data: int, stage: int, tmp_path: Path) -> None:
    """At stage 3 the config is live before the model is loaded, as in scripts that read their arguments first."""
    wanted = run_ranks(1, _by_trainer, str(tmp_path), "", stage, data)[0]
    for found in run_ranks(2 * data, _by_trainer, str(tmp_path), way, stage, data):
        assert found.largest_gap(wanted) < 1e-6
    _check_saved(tmp_path)


def _check_saved(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole, saved = (tiny.saved_weights(folder / name) for name in ("wanted", "end"))
    assert saved.keys() == whole.keys()
    assert all(torch.allclose(value, saved[name], rtol=0, atol=1e-6) for name, value in whole.items())
    model = AutoModelForCausalLM.from_pretrained(folder / "end", dtype="float32")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def _by_accelerate(rank: int, world: int, base: str, divided: bool, stage: int, data: int) -> list[float]:
    """A script for accelerate, saved as its documentation says; in one process without a plugin."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs, ParallelismConfig

    options: dict[str, Any] = {}
    if world == 1:
        _save_start(base)
    else:
        config = tiny.ds_config(stage, train_micro_batch_size_per_gpu=2, gradient_clipping=1.0)
        sizes = ParallelismConfig(tp_size=world // data, dp_shard_size=data)
        options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config), "parallelism_config": sizes}
    model = tiny.pretrained(base, divided=divided and world > 1)
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **options)
    rows = torch.randint(0, 96, (8, 12), generator=torch.Generator().manual_seed(3))
    loader = torch.utils.data.DataLoader(rows, batch_size=2 * data if world == 1 else 2)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert len(loader) == 4 // data
    norms = tiny.accelerate_loop(accelerator, model, optimizer, loader)[::2]  # losses are of one data rank's rows
    accelerator.unwrap_model(model).save_pretrained(
        tiny.shared_folder(base, "wanted" if world == 1 else "end"),
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    return norms


@pytest.mark.parametrize(("divided", "data", "stage"), [(True, 1, 1), (True, 1, 3), (False, 1, 3), (False, 2, 2)])
def test_an_accelerate_script_trains_and_saves_whole_weights(
    divided: bool, data: int, stage: int, tmp_path: Path
) -> None:
    """With a model that from_pretrained divides (`tp_plan`), and with one that `ParallelismConfig` alone divides."""
    wanted = run_ranks(1, _by_accelerate, str(tmp_path), divided, stage, data)[0]
    for found in run_ranks(2 * data, _by_accelerate, str(tmp_path), divided, stage, data):
        assert found == pytest.approx(wanted, abs=1e-6)
    _check_saved(tmp_path)


def _by_trainer_with_a_plan(rank: int, world: int, base: str) -> None:
    if rank == 0:
        tiny.model("llama").save_pretrained(Path(base, "start"))
    tiny.shared_folder(base, "run")
    model = tiny.pretrained(base, divided=True)
    run = tiny.trainer(tiny.arguments(Path(base, "run"), 1, {}), model)
    with pytest.raises(UsageError, match=r"Trainer never hands a LlamaForCausalLM that .*autotp_size\": 2}"):
        run.train()


def test_trainer_with_a_model_that_from_pretrained_has_divided_is_refused(tmp_path: Path) -> None:
    run_ranks(2, _by_trainer_with_a_plan, str(tmp_path))


def _sizes_that_differ(rank: int, world: int, base: str) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs, ParallelismConfig

    config = tiny.ds_config(1, train_micro_batch_size_per_gpu=2, tensor_parallel={"autotp_size": 4})
    Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(tp_size=2),
    )
    import deepspeed
    from accelerate.state import AcceleratorState

    with pytest.raises(PlanError, match=r"has tp_size 2, but tensor_parallel\.autotp_size is 4"):
        deepspeed.initialize(model=tiny.model("llama"), config=AcceleratorState().deepspeed_plugin.deepspeed_config)


def _adapters(rank: int, world: int, base: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    with pytest.raises(PlanError, match="the plan that PeftModel brings names no layer of it"):
        zeroshard.initialize(model=model, config={**config, "tensor_parallel": {"autotp_size": 2}})


def _divided_otherwise(rank: int, world: int, base: str) -> None:
    import deepspeed

    model = deepspeed.tp_model_init(tiny.model("llama"), 2, torch.float32)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    with pytest.raises(PlanError, match="autotp_size is 4, but the model is divided over 2 ranks already"):
        zeroshard.initialize(model=model, config={**config, "tensor_parallel": {"autotp_size": 4}})


@pytest.mark.parametrize("script", [_sizes_that_differ, _adapters, _divided_otherwise])
def test_what_would_be_divided_otherwise_than_asked_is_refused(script: Any, tmp_path: Path) -> None:
    run_ranks(2, script, str(tmp_path))

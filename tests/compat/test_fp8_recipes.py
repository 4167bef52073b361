"""accelerate's fp8 (`AORecipeKwargs`), Trainer's, and layers that torchao has swapped before `shard`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.compat import stand_in_te, tiny
from tests.support.beside import needs_torchao, use_beside
from tests.support.cases import sample
from tests.support.distributed import run_ranks
from tests.support.fp8_model import adamw, batch, build, loss_of, recipe
from tests.support.installed import need
from zeroshard.errors import UsageError
from zeroshard.fp8.linear import Fp8Linear

need("accelerate", "transformers")
pytestmark = needs_torchao

Run = tuple[list[float], set[str], set[str]]
"""Losses of a few steps, the layers in fp8, and the weights that rest in fp8."""
CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
INNER = tuple(f"model.layers.{layer}.mlp.{name}_proj" for layer in range(3) for name in ("gate", "up", "down"))


def _zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


def _accelerator(stage: int, precision: str, *handlers: Any, **sections: Any) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs

    plugin = DeepSpeedPlugin(hf_ds_config={**CONFIG, **_zero(stage), **sections})
    gloo = InitProcessGroupKwargs(backend="gloo")
    return Accelerator(mixed_precision=precision, deepspeed_plugin=plugin, kwargs_handlers=[gloo, *handlers])


def _in_fp8(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if isinstance(module, Fp8Linear)}


def _run(rank: int, stage: int, precision: str, *handlers: Any, **sections: Any) -> Run:
    model = tiny.model()  # built before, since under stage 3 it would be built by other random numbers
    return _losses(_accelerator(stage, precision, *handlers, **sections), rank, model)


def _losses(accelerator: Any, rank: int, model: nn.Module) -> Run:
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    plan = zeroshard.plan_of(engine.module)
    resting = {segment.name for _, group in plan.groups() if group.scaled for segment in group.layout.segments}
    layers, losses = _in_fp8(engine.module), []
    for step in range(3):
        ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    engine.destroy()
    tiny.forget()
    return losses, layers, resting


def _recipes(rank: int, world: int) -> None:
    use_beside()
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    def mlp(module: nn.Module, path: str) -> bool:
        return path in INNER

    by_row = Float8LinearConfig.from_recipe_name("rowwise")
    default = {f"{layer}.weight" for layer in _default_layers()}
    for handler, recipe_name, expected in (
        (AORecipeKwargs, "tensorwise", default),
        (partial(AORecipeKwargs, module_filter_func=mlp), "tensorwise", {f"{path}.weight" for path in INNER}),
        (partial(AORecipeKwargs, by_row, mlp), "rowwise", set()),
    ):
        runs = [
            _run(rank, stage, "fp8", handler()) for stage in sample([0, 1, 3, 2], 1 if handler is AORecipeKwargs else 2)
        ]
        losses, layers, resting = runs[0]
        assert resting == expected
        assert all(run == runs[0] for run in runs)
        fp8 = {"enabled": True, "recipe": recipe_name, "filter": sorted(layers)}
        assert _run(rank, 3, "bf16", fp8=fp8) == runs[0]
        assert _run(rank, 3, "bf16")[0] == pytest.approx(losses, rel=0.02)


def _default_layers() -> set[str]:
    """All linear layers but the first and the last, as accelerate's filter has it."""
    linears = [path for path, module in tiny.model().named_modules() if isinstance(module, nn.Linear)]
    return set(linears[1:-1])


def test_accelerates_recipes_of_torchao_train_as_the_section_fp8_does_at_all_stages() -> None:
    run_ranks(2, _recipes, timeout=300)


def _built_in_shards(rank: int, world: int) -> None:
    use_beside()
    import deepspeed
    from accelerate.utils import AORecipeKwargs

    runs: list[Run] = []
    for precision, handlers in (("fp8", [AORecipeKwargs()]), ("bf16", [])):
        with deepspeed.zero.Init(config_dict_or_path={**CONFIG, **_zero(3)}):
            model = tiny.model()
        runs.append(_losses(_accelerator(3, precision, *handlers), rank, model))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=0.02)
    assert runs[0][0] != runs[1][0]
    assert runs[0][1:] == (_default_layers(), {f"{layer}.weight" for layer in _default_layers()})


def test_a_model_that_was_built_in_shards_is_taken_over_too() -> None:
    run_ranks(2, _built_in_shards)


def _refused(rank: int, world: int) -> None:
    use_beside()
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    other = AORecipeKwargs(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"))
    for words, handler, sections in (
        (r"no counterpart here.*'rowwise_with_gw_hp'.*from_recipe_name\('tensorwise'\)", other, {}),
        ("fp8 is asked for twice.*AORecipeKwargs", AORecipeKwargs(), {"fp8": {"enabled": True}}),
    ):
        with pytest.raises(UsageError, match=words):
            _run(rank, 3, "fp8", handler, **sections)
        tiny.forget()


def test_recipes_without_a_counterpart_and_two_requests_for_fp8_are_refused() -> None:
    run_ranks(1, _refused)


def _trainer(rank: int, world: int, base: str) -> None:
    use_beside()
    from safetensors.torch import load_file

    runs: list[tiny.Run] = []
    for fp8, stage in ((True, 0), (True, 1), (True, 2), (True, 3), (False, 3)):
        model = tiny.model()
        if fp8:
            os.environ |= {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"}  # as accelerate launch
        trainer = tiny.trainer(tiny.arguments(Path(base), stage, {}, bf16=not fp8), model)
        trainer.train()
        assert _in_fp8(model) == (_default_layers() if fp8 else set())
        runs.append(tiny.logged(trainer))
        folder = tiny.shared_folder(base, f"saved{fp8}{stage}")
        trainer.save_model(str(folder))
        dist.barrier()
        saved = load_file(folder / "model.safetensors")
        for name, value in zeroshard.iterate_full_parameters(trainer.model):
            assert torch.equal(saved[name], value.bfloat16()), (name, stage)
        tiny.forget()
    *in_fp8, in_bf16 = runs
    assert all(run.losses == in_fp8[0].losses for run in in_fp8)
    assert in_fp8[0].losses != in_bf16.losses
    assert in_fp8[0].losses == pytest.approx(in_bf16.losses, rel=0.02)


def test_trainer_with_mixed_precision_fp8_trains_and_saves_at_all_stages(tmp_path: Path) -> None:
    run_ranks(2, _trainer, str(tmp_path), timeout=300)


def _transformer_engine(rank: int, world: int, folder: str) -> None:
    sys.path.insert(0, folder)
    from accelerate.utils import TERecipeKwargs
    from transformer_engine import pytorch as engine  # pyright: ignore[reportMissingImports]

    runs = [_run(rank, stage, "fp8", TERecipeKwargs()) for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    assert runs[0] == _run(rank, 3, "bf16")
    assert set(engine.entered) == {(True, "DelayedScaling")}


def test_layers_of_transformer_engine_train_as_plain_modules_at_all_stages(tmp_path: Path) -> None:
    stand_in_te.write(tmp_path)
    run_ranks(2, _transformer_engine, str(tmp_path), timeout=300)


def _swapped(rank: int, world: int, stage: int, plain: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Training of a model whose blocks torchao has swapped; without an engine if `plain`."""
    use_beside()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    model: Any = build()
    config = Float8LinearConfig(emulate=True, pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path.startswith("blocks."))
    optimizer: Any = None
    if plain:
        model, optimizer = model.bfloat16(), adamw(model.parameters())
    else:
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(stage, fp8=None))
    assert isinstance(model.get_submodule("blocks.0.up"), Float8Linear)
    losses: list[float] = []
    for step in range(1 if plain else 3):
        loss = loss_of(model, batch(step, 0, rank, rows=16))
        loss.backward()
        losses.append(float(loss.detach()))
        if not plain:
            optimizer.step()
            optimizer.zero_grad()
    if plain:
        return losses, {name: p.grad for name, p in model.named_parameters()}
    return losses, {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}


def test_layers_that_torchao_swapped_train_as_plain_modules_at_all_stages() -> None:
    first, *others = (run_ranks(2, _swapped, stage, False)[0] for stage in range(4))
    for losses, weights in others:
        assert losses == first[0]
        assert all(torch.equal(weights[name], value) for name, value in first[1].items())
    assert run_ranks(1, _swapped, 3, False)[0][0][0] == run_ranks(1, _swapped, 3, True)[0][0][0]

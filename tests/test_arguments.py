"""A wrong kind of argument is refused by the name of the call, at the call, and not somewhere inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as z
from zeroshard.errors import UsageError

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}


def initialize(**arguments: Any) -> Any:
    return z.initialize(**{"model": nn.Linear(2, 2), "config": CONFIG, **arguments})


OF_A_MODEL: list[Callable[[Any], object]] = [
    z.shard,
    z.close,
    z.full_state_dict,
    lambda model: list(z.iterate_full_parameters(model)),
    z.get_global_grad_norm,
    lambda model: z.clip_grad_norm_(model, 1.0),
    z.drain,
    z.plan_of,
    z.offload_states,
    z.reload_states,
    z.wait_for_checkpoint,
    z.Preemption,
    lambda model: z.save(model, "nowhere", "tag"),
    lambda model: z.load(model, "nowhere"),
    lambda model: z.GraphedStep(model, print),
    lambda model: initialize(model=model),
    z.checkpoint_activations,
    lambda model: z.set_z3_leaf_module(model, True),
    z.z3_leaf_module,
    z.get_z3_leaf_modules,
    lambda model: z.register_external_parameter(model, nn.Parameter(torch.ones(1))),
]


@pytest.mark.parametrize("wrong", [3, "model"])
def test_what_is_no_module_is_no_model(wrong: object) -> None:
    for call in OF_A_MODEL:
        with pytest.raises(UsageError, match=r"is needed, got (3|'model')$"):
            call(wrong)


OTHERS: dict[str, tuple[Callable[[], object], str]] = {
    "an optimizer": (lambda: z.shard(nn.Linear(2, 2), 3), "optimizer: a torch optimizer.* got 3"),  # type: ignore[call-overload]
    "a module as optimizer": (lambda: z.shard(nn.Linear(2, 2), nn.Linear(2, 2)), "optimizer: .* got a Linear"),
    "one number as parameters": (lambda: initialize(model_parameters=3), r"model_parameters=...\): .* got 3"),
    "a number as parameter": (lambda: initialize(model_parameters=[3]), "optimizer's parameters: .* got 3"),
    "a group of none": (lambda: initialize(model_parameters=[{"params": None}]), "parameters: .* got None"),
    "a group without any": (lambda: initialize(model_parameters=[{"lr": 1.0}]), "parameters: .* got None"),
    "data": (lambda: initialize(training_data=3), "dataset: .* got 3"),
    "GatheredParameters": (lambda: z.GatheredParameters("weight"), "GatheredParameters: .* got 'weight'"),  # type: ignore[arg-type]
    "a name in GatheredParameters": (lambda: z.GatheredParameters(["weight"]), "GatheredParameters: .* got 'weight'"),  # type: ignore[list-item]
    "a name for names": (lambda: z.set_z3_leaf_modules_by_name(nn.Linear(2, 2), "mlp"), "a list, is needed, got 'mlp'"),
    "a module for its class": (
        lambda: z.set_z3_leaf_modules(nn.Linear(2, 2), [nn.Linear(2, 2)]),  # type: ignore[list-item]
        "classes or their names, .* got a Linear",
    ),
    "an external parameter": (lambda: z.register_external_parameter(nn.Linear(2, 2), "weight"), "got 'weight'"),  # type: ignore[arg-type]
    "features": (lambda: z.TiledLinear("4", 4), "TiledLinear: a whole number .* got '4'"),  # type: ignore[arg-type]
    "a dtype": (lambda: z.OnDevice("bf16"), "OnDevice: a floating-point dtype .* got 'bf16'"),  # type: ignore[arg-type]
    "a device": (lambda: z.OnDevice(torch.float32, device="moon"), "no device 'moon'"),
    "matrices": (lambda: z.MuonAdamW(3), "MuonAdamW: .* got 3"),  # type: ignore[arg-type]
    "factors": (lambda: z.Dion(3), "Dion: .* got 3"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_say_what_is_needed(name: str) -> None:
    call, words = OTHERS[name]
    with pytest.raises(UsageError, match=words):
        call()

"""Configs by number: a valid one with a few things done to it, most of them so that it stays near to valid.

Values of other types stop at the first check of a config; what reaches the engine are values of the right kind that
don't go together. So most mutations here put a value of a key's own kind, and few put anything else.
"""

from __future__ import annotations

import copy
import random
from typing import Any, get_args

from pydantic.fields import FieldInfo

from tests.config.test_auto import TRAINER
from tests.config.test_published_configs import FINE_TUNE_8B, FINE_TUNE_70B, FP16_OFFLOAD, PRETRAIN_13B
from tests.support.edits import put, sections_of
from zeroshard.config.components import OPTIMIZERS, SCHEDULERS
from zeroshard.config.keys import Key, Status, key_table
from zeroshard.optim.schedules.named import TORCH_SCHEDULES

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}}
DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
SMALL = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW}
HOST = {"device": "cpu"}
SEEDS: list[dict[str, Any]] = [
    PRETRAIN_13B,
    FP16_OFFLOAD | {"optimizer": ADAMW},
    FINE_TUNE_70B,
    FINE_TUNE_8B | {"optimizer": ADAMW},
    TRAINER,
    *(SMALL | {"zero_optimization": {"stage": stage}, "scheduler": DECAY} for stage in range(4)),
    SMALL | {"zero_optimization": {"stage": 2, "offload_optimizer": HOST | {"ratio": 0.5}}, "bf16": {"enabled": True}},
    SMALL | {"zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}, "scheduler": CYCLE},
    SMALL | {"zero_optimization": {"stage": 3, "offload_param": HOST}, "fp16": {"enabled": True}},
    SMALL | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "gradient_accumulation_steps": 2},
    *(SMALL | {"optimizer": {"type": kind, "params": {"lr": 1e-3}}} for kind in OPTIMIZERS),
    *(SMALL | {"optimizer": {"type": kind}, "gradient_clipping": 0} for kind in ("OneBitAdam", "ZeroOneAdam")),
]
OBEYED = [key for key in key_table().with_status(Status.OBEYED) if not key.path.endswith(".*")]
OTHERS = [key for key in key_table().keys.values() if key.status is not Status.OBEYED]

NUMBERS = [0, 1, 2, 3, 8, 0.5, 1.0, 1e-3, 1e-8, 1.5, 1e9, 5e8, 64, 65536, 2**63 - 1, 1e30, -1, -0.5, 3e38, 1e308]
DTYPES = ["fp32", "fp16", "bf16", "bfloat16", "float16", "float32", "half", "int8", "fp8", "fp64", None]
NAMES = [[], ["Linear"], ["0"], ["out"], ["blocks.0"], ["norm"], [""], ["nothing"], ["torch.nn.Linear"], ["Model"]]
ODD = [
    None,
    True,
    False,
    "auto",
    "",
    "x",
    "1e-3",
    "cpu",
    [],
    {},
    [1],
    [0.9, 0.99],
    {"a": 1},
    float("nan"),
    1e400,
    10**40,
]
BY_KIND: dict[str, list[Any]] = {
    "bool": [True, False],
    "int": [number for number in NUMBERS if number == int(number) and number < 1e30],
    "number": NUMBERS,
    "dtype": DTYPES,
    "list": NAMES,
    '"auto"|list': ["auto", *NAMES],
    "str": ["x", "runs", ""],
}
TORCH_PARAMS = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 3]},
    "ExponentialLR": {"gamma": 0.9},
    "CyclicLR": {"base_lr": 1e-4, "max_lr": 1e-2},
    "OneCycleLR": {"max_lr": 1e-2, "total_steps": 10},
    "CosineAnnealingLR": {"T_max": 10},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
}


def mutated_config(number: int) -> dict[str, Any]:
    """The config of this number; the same one every time."""
    draw = random.Random(number)
    config = copy.deepcopy(draw.choice(SEEDS))
    for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 5])):
        draw.choice(_MUTATIONS)(config, draw)
    return config


def _obeyed(config: dict[str, Any], draw: random.Random) -> None:
    key = draw.choice(OBEYED)
    put(config, key.path, _value_for(key, draw))


def _other(config: dict[str, Any], draw: random.Random) -> None:
    key = draw.choice(OTHERS)
    put(config, key.path, draw.choice([*key.inert, key.default, _value_for(key, draw)]))


def _odd(config: dict[str, Any], draw: random.Random) -> None:
    section = draw.choice(sections_of(config))
    if section:
        section[draw.choice(sorted(section))] = copy.deepcopy(draw.choice(ODD))


def _drop(config: dict[str, Any], draw: random.Random) -> None:
    section = draw.choice(sections_of(config))
    if section:
        del section[draw.choice(sorted(section))]


def _optimizer(config: dict[str, Any], draw: random.Random) -> None:
    kind = draw.choice(sorted(OPTIMIZERS))
    config["optimizer"] = {"type": kind, "params": _params(OPTIMIZERS[kind].model_fields, draw)}


def _scheduler(config: dict[str, Any], draw: random.Random) -> None:
    kind = draw.choice([*SCHEDULERS, *SCHEDULERS, *TORCH_SCHEDULES])
    if kind in SCHEDULERS:
        fields = SCHEDULERS[kind].model_fields
        needed = {name: draw.choice([1, 2, 10, 1e-2]) for name, field in fields.items() if field.is_required()}
        config["scheduler"] = {"type": kind, "params": needed | _params(fields, draw)}
    else:
        params = dict(TORCH_PARAMS.get(kind, {}))
        if params and draw.random() < 0.5:
            params[draw.choice(sorted(params))] = draw.choice([*NUMBERS, *ODD])
        config["scheduler"] = {"type": kind, "params": params}


_MUTATIONS = [_obeyed, _obeyed, _obeyed, _optimizer, _optimizer, _scheduler, _other, _odd, _drop]


def _params(fields: dict[str, FieldInfo], draw: random.Random) -> dict[str, Any]:
    return {
        name: _param_for(fields[name], draw)
        for name in draw.sample(sorted(fields), k=min(len(fields), draw.choice([0, 1, 2, 3])))
    }


def _param_for(field: FieldInfo, draw: random.Random) -> Any:
    if draw.random() < 0.1:
        return copy.deepcopy(draw.choice(ODD))
    default = field.get_default()
    if isinstance(default, bool):
        return draw.choice([True, False])
    if isinstance(default, tuple):
        return [draw.choice([0, 0.5, 0.9, 0.999]), draw.choice([0, 0.5, 0.9, 0.999])]
    choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
    return draw.choice(choices or NUMBERS)


def _value_for(key: Key, draw: random.Random) -> Any:
    if draw.random() < 0.05:
        return copy.deepcopy(draw.choice(ODD))
    if key.path in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        return draw.choice([1, 2, 4, 2, 8, 3])
    if key.path.endswith(".stage"):
        return draw.choice([0, 1, 2, 3])
    if key.path == "optimizer.type":
        return draw.choice([*OPTIMIZERS, *(kind.lower() for kind in OPTIMIZERS), "MuAdam", "Adagard"])
    if key.path == "scheduler.type":
        return draw.choice([*SCHEDULERS, *TORCH_SCHEDULES, "warmuplr", "Warmup"])
    if key.path.endswith("grad_accum_dtype"):
        return draw.choice(["fp32", "bf16", "fp16", None])
    if key.kind.startswith('"') and key.kind not in BY_KIND:
        return draw.choice([choice.strip('"') for choice in key.kind.split("|")])
    return copy.deepcopy(draw.choice(BY_KIND.get(key.kind, ODD)))

"""Writes a row as a DeepSpeed JSON config, and reads such a config as a recipe, for the planner's command line.

This is the only module of the planner that knows configs. A setting whose config is refused is one that the engine does
not run yet, so the planner needs no list of what is built.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zeroshard.config import Config
from zeroshard.config.optimizers import LOW_BIT, ONE_BIT
from zeroshard.config.resolve import resolve
from zeroshard.errors import ConfigError, PlanError
from zeroshard.plan.builder import Recipe
from zeroshard.plan.dtypes import dtype_name
from zeroshard.plan.placement import Blocks, Tier
from zeroshard.planner.files import read_json
from zeroshard.planner.machine.hardware import Cluster, Gpu
from zeroshard.planner.predict.rows import Setting
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.recipes import recipe_of

Document = dict[str, Any]
SPLIT_MASTERS = ("Adam", "AdamW")
"""Optimizers whose device kernel updates bf16 parameters with a 16-bit remainder as master weights."""
AUTO: Literal["auto"] = "auto"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class ReadConfig:
    """What the planner needs of a config.

    Attributes:
        micro: sequences per rank and micro-batch.
        accumulation: micro-batches per step.
        refused: why the engine does not run it; "" if it does.
        autocast: dtype of torch.autocast; None without it.
        shard: ranks of each subgroup that shards; None if all ranks are one group.
    """

    recipe: Recipe
    micro: int
    accumulation: int
    stage: int
    refused: str
    autocast: str | None = None
    shard: int | None = None


_COPIES, _SUBGROUPS, _SUMS = "zero_hpz_partition_size", "mics_shard_size", "zero_quantized_gradients"
_DIFFERENCES = "zero_quantized_weight_differences"
_FOR_STAGE_3 = (_COPIES, "zero_quantized_weights", "zero_quantized_nontrainable_weights", _DIFFERENCES)
_REFUSED_AT = {0: (*_FOR_STAGE_3, _SUBGROUPS, _SUMS), 1: _FOR_STAGE_3, 2: _FOR_STAGE_3}
"""Keys that are refused at a stage; second copies only if no quantized sums of gradients need them."""


def default_document(gpu: Gpu) -> Document:
    """The config of a row if none was given: AdamW, clipping, the 16-bit dtype that the card has."""
    return {
        "bf16" if gpu.has_bf16 else "fp16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 0, "overlap_comm": True},
    }


def read_document(path: Path, option: str = "--config") -> Document:
    """The JSON object in a file. Raises PlanError, with the option that named it, if it has none."""
    content = read_json(f"{option} {path}", path)
    if not isinstance(content, dict):
        raise PlanError(f"{option} {path}: not a JSON object")
    return content


def without_autos(document: Document, gpu: Gpu) -> Document:
    """The config without those "auto" values that Hugging Face's Trainer would fill in.

    The precision becomes the 16-bit dtype that the card has, and a batch that is not given one sequence. Learning rates
    and schedules are dropped, since they change no byte. Every other "auto" stays, and is read as the engine reads it.
    """
    changed = copy.deepcopy(document)
    for section, enabled in (("bf16", gpu.has_bf16), ("fp16", not gpu.has_bf16)):
        entry = changed.get(section)
        if isinstance(entry, dict) and entry.get("enabled") == AUTO:
            entry["enabled"] = enabled
    if changed.get("gradient_clipping") == AUTO:
        changed["gradient_clipping"] = 1.0
    optimizer = changed.get("optimizer")
    if isinstance(optimizer, dict) and isinstance(optimizer.get("params"), dict):
        optimizer["params"] = {key: value for key, value in optimizer["params"].items() if value != AUTO}
        if optimizer.get("type") == AUTO:
            del changed["optimizer"]
    zero = changed.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") == AUTO:
        zero["stage"] = 3  # it takes the least memory; rows of the table set their own
    changed.pop("scheduler", None)
    for key in BATCH_KEYS:
        if changed.get(key) == AUTO:
            changed.pop(key)
    if not any(key in changed for key in BATCH_KEYS[:2]):
        changed[BATCH_KEYS[1]] = 1
    return changed


def with_batch(document: Document, micro: int | None, accumulation: int | None) -> Document:
    """The config with the batch of the command line, if it gives one; the global batch of a config is kept."""
    changed = copy.deepcopy(document)
    given = any(key in changed for key in BATCH_KEYS)
    if micro is not None and accumulation is None and _number(changed.get("train_batch_size")) is not None:
        changed["train_micro_batch_size_per_gpu"] = micro
        changed.pop("gradient_accumulation_steps", None)
    elif micro is not None or not given:
        changed["train_micro_batch_size_per_gpu"] = 1 if micro is None else micro
        given_steps = _number(changed.get(BATCH_KEYS[2])) or 1
        changed["gradient_accumulation_steps"] = given_steps if accumulation is None else accumulation
        changed.pop("train_batch_size", None)
    elif accumulation is not None:
        changed["gradient_accumulation_steps"] = accumulation
        if isinstance(changed.get("train_micro_batch_size_per_gpu"), int):
            changed.pop("train_batch_size", None)
    return changed


def with_setting(document: Document, setting: Setting) -> Document:
    """The config of one row: its stage, its offload, and checkpointed blocks, by a key that DeepSpeed ignores."""
    changed = copy.deepcopy(document)
    if setting.checkpointing is not Checkpointing.OFF:
        changed["activation_checkpointing"] = {**(changed.get("activation_checkpointing") or {}), "policy": "full"}
    zero = changed.setdefault("zero_optimization", {})
    zero["stage"] = setting.stage
    optimizer, parameters = zero.pop("offload_optimizer", None), zero.pop("offload_param", None)
    for key in _REFUSED_AT.get(setting.stage, ()):
        # Where parameters rest whole, the key of second copies gives the subgroups of quantized sums.
        if key != _COPIES or not zero.get(_SUMS) or setting.stage == 0:
            zero.pop(key, None)
    if setting.offload is not Offload.NONE:
        zero["offload_optimizer"] = _offload_section(setting.offload.states, optimizer, parameters)
        if setting.ratio < 1:
            zero["offload_optimizer"]["ratio"] = setting.ratio
        if setting.offload.parameters is not Tier.DEVICE:
            zero["offload_param"] = _offload_section(setting.offload.parameters, parameters, optimizer)
    return changed


def _offload_section(tier: Tier, *given: object) -> dict[str, Any]:
    """A section for offload to a tier; for a disk with the first folder that one of the given sections names."""
    if tier is Tier.HOST:
        return {"device": "cpu", "pin_memory": True}
    paths = (section.get("nvme_path") for section in given if isinstance(section, Mapping))
    return {"device": "nvme", "pin_memory": True, "nvme_path": next(filter(None, paths), "/local_nvme")}


def read_config(document: Document, cluster: Cluster, *, keep_fp32: tuple[str, ...] = ()) -> ReadConfig:
    """Read a config for a cluster. Raises ConfigError if it is refused even without its offload."""
    document, world, refused = without_autos(document, cluster.gpu), cluster.count, ""
    try:
        config = _config(document, world)
    except ConfigError as error:
        refused = _refusal(error)
        config = _config(without_offload(document), world)
    recipe = replace(
        recipe_of(config, keep_fp32), moments=_moments(config), compressed=_optimizer_type(config) in ONE_BIT
    )
    recipe = replace(recipe, blocks=_blocks(config))
    if _optimizer_type(config) not in SPLIT_MASTERS:
        recipe = replace(recipe, precision=replace(recipe.precision, master="float32"))
    stage = config.zero.stage
    assert stage != AUTO  # without_autos has replaced it
    low = config.precision.autocast
    autocast = None if low is None else dtype_name(low)
    return ReadConfig(
        recipe, config.batch.micro, config.batch.accumulation, stage, refused, autocast, config.zero.subgroup
    )


def _config(document: Document, world: int) -> Config:
    return resolve(document, world_size=world, client_optimizer="optimizer" not in document).config


def without_offload(document: Document) -> Document:
    """The config without its sections for offload."""
    changed = copy.deepcopy(document)
    zero = changed.get("zero_optimization")
    if isinstance(zero, dict):
        zero.pop("offload_optimizer", None)
        zero.pop("offload_param", None)
    return changed


def offload_of(document: Mapping[str, Any]) -> Offload:
    """The offload that a config asks for."""
    zero = document.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return Offload.NONE

    def device(key: str) -> str:
        entry = zero.get(key)
        return str(entry.get("device", "none")) if isinstance(entry, Mapping) else "none"

    tiers = {"cpu": Tier.HOST, "nvme": Tier.NVME}
    parameters = tiers.get(device("offload_param"), Tier.DEVICE)
    states = tiers.get(device("offload_optimizer"), parameters)  # offloaded parameters offload the state, too
    return Offload.of(states, parameters)


def stage_is_auto(document: Mapping[str, Any]) -> bool:
    """Whether a config lets the planner choose the stage at start-up."""
    zero = document.get("zero_optimization")
    return isinstance(zero, Mapping) and zero.get("stage") == AUTO


def ratio_of(document: Mapping[str, Any]) -> float:
    """The share of the optimizer's state that a config offloads."""
    zero = document.get("zero_optimization")
    entry = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    ratio = entry.get("ratio", 1.0) if isinstance(entry, Mapping) else 1.0
    return float(ratio) if isinstance(ratio, (int, float)) else 1.0


def _refusal(error: ConfigError) -> str:
    """What is not built, without the key and the advice of the error."""
    text = str(error.problems[0] if error.problems else error).partition("; ")[0]
    asked = re.search(r"asks for (.+), which (is not built yet)", text)
    return f"{asked[1]} {asked[2]}" if asked else text


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _optimizer_type(config: Config) -> str:
    """The optimizer's type; a script's own optimizer is assumed to be AdamW."""
    return "AdamW" if config.optimizer is None else config.optimizer.type


def _blocks(config: Config) -> Blocks | None:
    """The blocks of quantized moments; None for moments in float32."""
    if config.optimizer is None or config.optimizer.type not in LOW_BIT:
        return None
    return Blocks(LOW_BIT[config.optimizer.type], config.optimizer.params["block_size"])


def _moments(config: Config) -> int:
    """Optimizer states per parameter.

    Muon and Dion are counted as Adam, since the names of their matrices are not known here.
    """
    kind = _optimizer_type(config)
    params = {} if config.optimizer is None else config.optimizer.params
    if kind == "SGD":
        return 1 if params.get("momentum") else 0
    if kind == "RMSprop":
        return 1 + bool(params.get("momentum")) + bool(params.get("centered"))
    if kind == "ZeroOneAdam":
        return 3 if params.get("local_step_clipper", 0) > 1 else 1
    return 1 if kind in ("Lion", "Adagrad", "OneBitAdam") else 2

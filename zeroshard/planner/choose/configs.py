"""Configs for the planner's command line: what a row's DeepSpeed JSON is, and what it means as a recipe.

The only part of the planner that knows configs. A setting that the config refuses is one that the engine does not run
yet, so the table follows what is built without a list of its own.
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
class Meaning:
    """A document as the planner needs it.

    Attributes:
        refused: why the engine does not run it, "" where it does.
        shard: ranks of a subgroup; None where all are one.
    """

    recipe: Recipe
    micro: int
    accumulation: int
    setting_stage: int
    refused: str
    autocast: str | None = None
    shard: int | None = None


_COPIES, _SUBGROUPS, _SUMS = "zero_hpz_partition_size", "mics_shard_size", "zero_quantized_gradients"
_DIFFERENCES = "zero_quantized_weight_differences"
_FOR_STAGE_3 = (_COPIES, "zero_quantized_weights", "zero_quantized_nontrainable_weights", _DIFFERENCES)
_NOT_AT = {0: (*_FOR_STAGE_3, _SUBGROUPS, _SUMS), 1: _FOR_STAGE_3, 2: _FOR_STAGE_3}
"""Keys that mean nothing at a stage, and are refused there; second copies but for sums in codes."""


def default_document(gpu: Gpu) -> Document:
    """What a row is written as where no config was given: AdamW, clipping, the 16-bit dtype that the card has."""
    return {
        "bf16" if gpu.has_bf16 else "fp16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 0, "overlap_comm": True},
    }


def read_document(path: Path, option: str = "--config") -> Document:
    """The JSON object in a file. Raises PlanError where there is none, by the option that named it."""
    content = read_json(f"{option} {path}", path)
    if not isinstance(content, dict):
        raise PlanError(f"{option} {path}: not a JSON object")
    return content


def without_autos(document: Document, gpu: Gpu) -> Document:
    """The document as a plan needs it: with what the HF Trainer would fill in, or without it where it does not matter.

    The precision is the 16-bit dtype that the card has; a batch of which nothing is said is one sequence. Rates and
    schedules change no byte. Every other "auto" is left to the config, which knows what it means.
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
        zero["stage"] = 3  # the last that would be chosen; the table's rows write their own
    changed.pop("scheduler", None)
    for key in BATCH_KEYS:
        if changed.get(key) == AUTO:
            changed.pop(key)
    if not any(key in changed for key in BATCH_KEYS[:2]):
        changed[BATCH_KEYS[1]] = 1
    return changed


def with_batch(document: Document, micro: int | None, accumulation: int | None) -> Document:
    """The document with the batch of the command line, where it gives one; the global batch of a config stays."""
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
    """The document of one row: its stage, its offload, and checkpointed blocks, by a key that DeepSpeed passes over."""
    changed = copy.deepcopy(document)
    if setting.checkpointing is not Checkpointing.OFF:
        changed["activation_checkpointing"] = {**(changed.get("activation_checkpointing") or {}), "policy": "full"}
    zero = changed.setdefault("zero_optimization", {})
    zero["stage"] = setting.stage
    optimizer, parameters = zero.pop("offload_optimizer", None), zero.pop("offload_param", None)
    for key in _NOT_AT.get(setting.stage, ()):
        # Where parameters rest whole, second copies say what sums in codes go within first.
        if key != _COPIES or not zero.get(_SUMS) or setting.stage == 0:
            zero.pop(key, None)
    if setting.offload is not Offload.NONE:
        zero["offload_optimizer"] = _placed(setting.offload.states, optimizer, parameters)
        if setting.ratio < 1:
            zero["offload_optimizer"]["ratio"] = setting.ratio
        if setting.offload.parameters is not Tier.DEVICE:
            zero["offload_param"] = _placed(setting.offload.parameters, parameters, optimizer)
    return changed


def _placed(tier: Tier, *given: object) -> dict[str, Any]:
    """A section of offload; for a disk with the first folder that sections of the document name."""
    if tier is Tier.HOST:
        return {"device": "cpu", "pin_memory": True}
    paths = (section.get("nvme_path") for section in given if isinstance(section, Mapping))
    return {"device": "nvme", "pin_memory": True, "nvme_path": next(filter(None, paths), "/local_nvme")}


def meaning(document: Document, cluster: Cluster, *, keep_fp32: tuple[str, ...] = ()) -> Meaning:
    """What a document means on a cluster. Raises ConfigError for what no offload explains."""
    document, world, refused = without_autos(document, cluster.gpu), cluster.count, ""
    try:
        config = _config(document, world)
    except ConfigError as error:
        refused = _first(error)
        config = _config(without_offload(document), world)
    recipe = replace(recipe_of(config, keep_fp32), moments=_moments(config), compressed=_kind(config) in ONE_BIT)
    recipe = replace(recipe, blocks=_blocks(config))
    if _kind(config) not in SPLIT_MASTERS:
        recipe = replace(recipe, precision=replace(recipe.precision, master="float32"))
    stage = config.zero.stage
    assert stage != AUTO  # without_autos took it out
    low = config.precision.autocast
    autocast = None if low is None else dtype_name(low)
    return Meaning(
        recipe, config.batch.micro, config.batch.accumulation, stage, refused, autocast, config.zero.subgroup
    )


def _config(document: Document, world: int) -> Config:
    return resolve(document, world_size=world, client_optimizer="optimizer" not in document).config


def without_offload(document: Document) -> Document:
    changed = copy.deepcopy(document)
    zero = changed.get("zero_optimization")
    if isinstance(zero, dict):
        zero.pop("offload_optimizer", None)
        zero.pop("offload_param", None)
    return changed


def offload_of(document: Mapping[str, Any]) -> Offload:
    """The offload that a document asks for."""
    zero = document.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return Offload.NONE

    def device(key: str) -> str:
        entry = zero.get(key)
        return str(entry.get("device", "none")) if isinstance(entry, Mapping) else "none"

    tiers = {"cpu": Tier.HOST, "nvme": Tier.NVME}
    parameters = tiers.get(device("offload_param"), Tier.DEVICE)
    states = tiers.get(device("offload_optimizer"), parameters)  # which takes the state along
    return Offload.of(states, parameters)


def stage_is_auto(document: Mapping[str, Any]) -> bool:
    """Whether a document leaves the stage to the planner at start-up."""
    zero = document.get("zero_optimization")
    return isinstance(zero, Mapping) and zero.get("stage") == AUTO


def ratio_of(document: Mapping[str, Any]) -> float:
    """The share of the optimizer's state that a document offloads."""
    zero = document.get("zero_optimization")
    entry = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    ratio = entry.get("ratio", 1.0) if isinstance(entry, Mapping) else 1.0
    return float(ratio) if isinstance(ratio, (int, float)) else 1.0


def _first(error: ConfigError) -> str:
    """What is not built, without the key and the cure (which is to ask for something else)."""
    text = str(error.problems[0] if error.problems else error).partition("; ")[0]
    asked = re.search(r"asks for (.+), which (is not built yet)", text)
    return f"{asked[1]} {asked[2]}" if asked else text


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _kind(config: Config) -> str:
    """The optimizer; the script's own is taken to be AdamW."""
    return "AdamW" if config.optimizer is None else config.optimizer.type


def _blocks(config: Config) -> Blocks | None:
    """How the optimizer's moments are kept in few bits."""
    if config.optimizer is None or config.optimizer.type not in LOW_BIT:
        return None
    return Blocks(LOW_BIT[config.optimizer.type], config.optimizer.params["block_size"])


def _moments(config: Config) -> int:
    """Optimizer states per parameter. Muon is counted as Adam: which parameters are its matrices, its names decide."""
    kind = _kind(config)
    params = {} if config.optimizer is None else config.optimizer.params
    if kind == "SGD":
        return 1 if params.get("momentum") else 0
    if kind == "RMSprop":
        return 1 + bool(params.get("momentum")) + bool(params.get("centered"))
    if kind == "ZeroOneAdam":
        return 3 if params.get("local_step_clipper", 0) > 1 else 1
    return 1 if kind in ("Lion", "Adagrad", "OneBitAdam") else 2

"""The section zero_optimization as an object, made from zeroshard's table of keys."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from deepspeed._exports import lazy
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.logging import logger
from zeroshard.config.document import read_document
from zeroshard.config.entries import gather_entries
from zeroshard.config.keys import Status, key_table
from zeroshard.config.problems import Problems

ZERO_OPTIMIZATION = "zero_optimization"

__getattr__, __dir__ = lazy(__name__, {})


class ZeroStageEnum(IntEnum):
    """What is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroConfig:
    """Every key of the section as an attribute, with its default where it is not given.

    Attributes:
        overlap_comm: where it is not given, whether the stage is 3.
        leaf_module: a section of its own.
        offload_param, offload_optimizer: the same; None where they are not given.

    Raises:
        DeepSpeedConfigError: an unknown key, or one that is given twice.
    """

    def __init__(self, **values: Any) -> None:
        problems = Problems()
        table = key_table()
        entries = gather_entries(read_document({ZERO_OPTIMIZATION: values}, problems), None, table, problems)
        problems.raise_if_any()
        start = f"{ZERO_OPTIMIZATION}."
        known = [
            key for key in table.keys.values() if key.path.startswith(start) and key.status is not Status.DEPRECATED
        ]
        given: dict[str, dict[str, Any]] = {}
        for key in known:
            section, _, name = key.path.removeprefix(start).rpartition(".")
            entry = entries.get(key.path)
            if section:
                given.setdefault(section, {})
                if entry is not None:
                    given[section][name] = entry.value
            else:
                vars(self)[name] = key.default if entry is None else entry.value
        parameters, optimizer = given["offload_param"], given["offload_optimizer"]
        self.stage = ZeroStageEnum(int(vars(self)["stage"])) if vars(self)["stage"] != "auto" else "auto"
        if vars(self)["overlap_comm"] is None:
            self.overlap_comm = self.stage == ZeroStageEnum.weights
        self.leaf_module = DeepSpeedZeroLeafModuleConfig(**given["leaf_module"])
        self.offload_param = self.offload_optimizer = None
        if parameters or values.get("offload_param") is not None:
            self.offload_param = DeepSpeedZeroOffloadParamConfig(**parameters)
        if optimizer or values.get("offload_optimizer") is not None:
            self.offload_optimizer = DeepSpeedZeroOffloadOptimizerConfig(**optimizer)
        if self.stage == ZeroStageEnum.weights and vars(self)["elastic_checkpoint"]:
            logger.warning(
                "zero_optimization.elastic_checkpoint: elastic checkpointing is deprecated at stage 3, and has no "
                "effect: every checkpoint loads at any number of ranks"
            )

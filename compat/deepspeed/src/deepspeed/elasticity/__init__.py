"""One batch size for many numbers of ranks: what the section elasticity of a config allows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from deepspeed._exports import lazy
from deepspeed.elasticity.config import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize
from zeroshard.config.elastic_config import batch_of
from zeroshard.config.models import ElasticitySection

_OLDEST = (0, 3, 8)
"""The first DeepSpeed that has the section."""
_NEEDED = ("max_train_batch_size", "micro_batch_sizes")
_IGNORED = ("min_time",)
_MODEL_PARALLEL = "model_parallel_size"

__all__ = ["ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize", "compute_elastic_config"]

__getattr__, __dir__ = lazy(__name__, {"config": "deepspeed.elasticity.config"})


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the config has the section, switched on."""
    section = ds_config.get("elasticity")
    return isinstance(section, Mapping) and section.get("enabled") in (True, 1)


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """The batch that a config's section elasticity asks for, and the numbers of ranks that it allows.

    Args:
        target_deepspeed_version: the version that will train with it.
        world_size: ranks that will; their micro-batch is the third result then.
        return_microbatch: give that for WORLD_SIZE ranks of the environment, where `world_size` is not given.

    Raises:
        ElasticityError: the section is not there, or not enabled, or wrong, or allows no batch.
        ElasticityIncompatibleWorldSize: it does not allow so many ranks.
    """
    if _numbers(target_deepspeed_version) < _OLDEST:
        raise ElasticityError(f"elasticity: DeepSpeed {target_deepspeed_version} does not know it; 0.3.8 is the first")
    if not elasticity_enabled(ds_config):
        raise ElasticityError("elasticity.enabled is not true: the config has no batch for several numbers of ranks")
    section = _section(ds_config["elasticity"])
    found = batch_of(section)
    if found is None:
        raise ElasticityConfigError("elasticity allows no batch within max_train_batch_size for any number of ranks")
    ranks = world_size or (int(os.environ.get("WORLD_SIZE", "0")) if return_microbatch else 0)
    if not ranks:
        return found.train, list(found.sizes)
    if ranks not in found.sizes:
        raise ElasticityIncompatibleWorldSize(
            f"elasticity does not allow {ranks} ranks with its batch of {found.train}; allowed: {list(found.sizes)}"
        )
    return found.train, list(found.sizes), found.micro_batch(ranks)


def _section(given: Mapping[str, Any]) -> ElasticitySection:
    values = {name: value for name, value in given.items() if name not in _IGNORED}
    for name in _NEEDED:
        if name not in values:
            raise ElasticityConfigError(f"elasticity.{name} is missing")
    if values.pop(_MODEL_PARALLEL, 1) != 1:
        raise ElasticityConfigError(f"elasticity.{_MODEL_PARALLEL}: model parallelism is not built yet; leave it at 1")
    try:
        return ElasticitySection.model_validate(values)
    except ValidationError as error:
        raise ElasticityConfigError(f"elasticity: {error}") from error


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:3] if part.isdigit())

"""`"zero_optimization": {"stage": "auto"}`: a config whose stage and offload the planner fills in when the ranks start.

Each candidate is the config itself with a stage and an offload written into it, read as any other config is; so what a
config may not combine is no candidate, and the choice is a config that could have been written by hand. An offload that
the config asks for is kept, and "device": "none" keeps the planner from using host memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from zeroshard.config import Config
from zeroshard.config.document import Source as ConfigSource
from zeroshard.config.document import read_document
from zeroshard.config.problems import Problems
from zeroshard.config.resolve import Resolution
from zeroshard.engine.automatic import OFFLOADS, assumed_example, choose, example_of, reachable
from zeroshard.engine.planning import check_update, make_plan
from zeroshard.errors import ConfigError, PlanError
from zeroshard.mesh import Mesh
from zeroshard.optim.sources import Source
from zeroshard.plan.builder import Recipe, with_peer_copies
from zeroshard.plan.check import peer_problem
from zeroshard.plan.plan import Plan
from zeroshard.planner.choose.startup import Example
from zeroshard.planner.predict.tiers import Offload
from zeroshard.recipes import recipe_of
from zeroshard.sharding.units import find_units


def chosen_document(
    model: nn.Module,
    given: ConfigSource,
    config: Config,
    read: Callable[[ConfigSource], Resolution],
    source: Source | None,
    device: torch.device,
    example: Example | None,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """The config with the planner's stage and offload in it; called by all ranks.

    Args:
        given, config: the config as it was written, and as it was read.
        read: reads one, without its warnings.
        example: a micro-batch; None lets one be assumed where the model's forward is of a known kind.

    Raises:
        PlanError: nothing fits, or nothing can be run.
    """
    document = read_document(given, Problems()).root
    peers = reachable(device)

    def make(stage: int, offload: Offload, more: bool, share: float) -> Plan:
        try:
            candidate = read(with_choice(document, stage, offload, share)).config
        except ConfigError as error:
            raise PlanError(str(error)) from error
        plan = make_plan(
            model, _without_peers(candidate, model, mesh), source, device, mesh=mesh, accumulate=more or None
        )
        check_update(plan, source)
        return with_peer_copies(plan) if peers and peer_problem(plan) is None else plan

    example = example or assumed_example(model, config.batch.micro, config.zero.automatic_length)
    found = choose(
        model,
        find_units(model),
        make,
        example,
        device,
        limit=config.zero.automatic_memory,
        offloads=_offloads(document),
        share=_ratio(document),
    )
    return with_choice(document, found.stage, found.offload, found.share)


def with_choice(document: Mapping[str, Any], stage: int, offload: Offload, share: float) -> dict[str, Any]:
    """The document with that stage, and with an offload where there is one; what else it says of offload is kept.

    Args:
        share: of the optimizer's state, where the document gives no ratio.
    """
    changed = copy.deepcopy(dict(document))
    zero = changed["zero_optimization"]
    zero["stage"] = stage
    if offload is not Offload.NONE:
        zero["offload_optimizer"] = {"ratio": share, **zero.get("offload_optimizer", {}), "device": "cpu"}
    if offload is Offload.CPU_PARAM:
        zero["offload_param"] = {**zero.get("offload_param", {}), "device": "cpu"}
    return changed


def _ratio(document: Mapping[str, Any]) -> float | None:
    """The share of the optimizer's state that a document fixes, None where it is left open."""
    entry = document["zero_optimization"].get("offload_optimizer")
    ratio = entry.get("ratio") if isinstance(entry, Mapping) else None
    return None if ratio is None else float(ratio)


def _offloads(document: Mapping[str, Any]) -> tuple[Offload, ...]:
    """The offloads that a document leaves open."""
    zero = document["zero_optimization"]
    optimizer, param = zero.get("offload_optimizer"), zero.get("offload_param")
    if isinstance(param, Mapping) and param.get("device") == "cpu":
        return (Offload.CPU_PARAM,)
    if isinstance(optimizer, Mapping) and "device" in optimizer:
        return (Offload.NONE,) if optimizer["device"] == "none" else (Offload.CPU,)
    return OFFLOADS if param is None else OFFLOADS[:2]


def example_from(data: Dataset[Any] | None, collate: Callable[[list[Any]], Any] | None, micro: int) -> Example | None:
    """A micro-batch of the first samples of a dataset that can be indexed; None for others, and where that fails."""
    if data is None or isinstance(data, IterableDataset):
        return None
    try:
        batch = (collate or default_collate)([data[index] for index in range(micro)])
    except Exception:  # a dataset may raise anything; the loader says so better, when it is used
        return None
    found = example_of(batch)
    return None if found is None else Example(found.args, found.kwargs, "the first samples of the training data")


def kept_in_fp32(model: nn.Module) -> tuple[str, ...]:
    """What a transformers model says of its modules that stay in float32."""
    return tuple(getattr(model, "_keep_in_fp32_modules", None) or ())


def _without_peers(config: Config, model: nn.Module, mesh: Mesh | None) -> Recipe:
    """Whether peers reach each other is asked once, by all ranks; plans are made on the first alone."""
    recipe = recipe_of(config, kept_in_fp32(model))
    row = recipe.sharding if mesh is None else recipe.sharding.on(mesh)
    return replace(recipe, sharding=row, peer_copies=False)

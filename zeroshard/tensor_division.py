"""Divides a model over an axis of tensor parallelism, as a config asks for it: by the plan that the model brings.

    autotp_size 2                       transformers' own `base_model_tp_plan`, applied by transformers
    autotp_size 2, partition_config     the layers that its patterns name, by torch's parallelize_module

What a plan can't divide is refused with the numbers, before any rank has changed a parameter. Rejected: rules by names
of layers, which are right for the models that somebody has tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zeroshard.errors import PlanError
from zeroshard.first_values import take_first_values
from zeroshard.mesh import TENSOR
from zeroshard.model_plan import AUTOTP, SPECS, check_heads, expanded, own_plan
from zeroshard.sharding.dtensors import ranks_of_axis
from zeroshard.sharding.resting import is_resting
from zeroshard.sharding.unowned import unowned_shard_of
from zeroshard.sharding.unowned_values import take_whole
from zeroshard.tensor_layers import divide_layers, layers_of
from zeroshard.tensor_probe import check_divided, see_whole


def divide_by_plan(
    model: nn.Module,
    ranks: int,
    device_type: str,
    partition: object = None,
    *,
    staged: bool = False,
) -> dict[int, nn.Parameter]:
    """Divide `model` over `ranks` neighbours; called by all ranks. What of it is divided already stays as it is.

    Args:
        partition: DeepSpeed's `partition_config`: which layers are divided, in place of the model's plan.
        staged: the model is one stage of a pipeline, which may have none of the layers that are named.

    Returns:
        By the id of each parameter that the model had, the one that it has in its place.

    Raises:
        PlanError: the world, the heads or a dim does not divide by `ranks`; the model brings no plan of its layers, or
            is divided over another number of ranks already.
    """
    already = ranks_of_axis(model, TENSOR)
    if already not in (1, ranks):
        raise PlanError(f"{AUTOTP} is {ranks}, but the model is divided over {already} ranks already; change {AUTOTP}")
    if already > 1:
        return {}
    world = dist.get_world_size() if dist.is_initialized() else 1
    absent = next((name for name, one in model.named_parameters() if _has_no_values(one)), None)
    if absent is not None:
        raise PlanError(
            f"{AUTOTP}: parameter {absent!r} has no values here (zeroshard.Init, the meta device), or belongs to an "
            "engine; build the model outside of it, or let transformers load it with tp_plan='auto'"
        )
    if world % ranks:
        raise PlanError(f"{AUTOTP} {ranks} does not divide the {world} ranks that run")
    check_heads(model, ranks)
    plan = None if partition is not None else own_plan(model)
    apply = None if plan is None else _applying()
    layers = {} if partition is None else layers_of(model, partition, ranks, all_of_it=not staged)
    styles = {} if plan is None else _styles_of(model, plan)
    _refuse_hooks(model, [*layers, *styles])
    mesh = init_device_mesh(device_type, (world // ranks, ranks), mesh_dim_names=("dp_shard", "tp"))
    take_first_values([*model.parameters(), *model.buffers()], mesh["tp"].get_group(), torch.device(device_type))
    seen = [] if staged else see_whole(model, layers)
    before = dict(model.named_parameters(remove_duplicate=False))
    if plan is None or apply is None:
        _take_whole(model, layers)
        divide_layers(model, mesh["tp"], layers)
        check_divided(seen, ranks, torch.device(device_type))
    else:
        shared = any(is_resting(one) for one in model.parameters())
        for paths, some in _by_module(model, styles) if shared else [((), styles)]:
            _take_whole(model, paths)
            apply(model, mesh["tp"], some)
        tie = getattr(model, "tie_weights", None)
        if callable(tie):  # each name of a tied weight got a parameter of its own
            tie()
    after = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in before.items():
        if after[name] is not parameter:  # what a script has written on it, for an optimizer to read say
            vars(after[name]).update(_written_on(parameter))
    return {id(parameter): after[name] for name, parameter in before.items()}


def _written_on(parameter: nn.Parameter) -> dict[str, Any]:
    return {name: value for name, value in vars(parameter).items() if not name.startswith("_zeroshard")}


def _refuse_hooks(model: nn.Module, divided: Iterable[str]) -> None:
    """Raises PlanError for a parameter with hooks that would be divided: they would stay on the whole one.

    Args:
        divided: paths of modules, and names of parameters.
    """
    paths = set(divided)
    for name, parameter in model.named_parameters():
        hooked = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooked and not paths.isdisjoint((name, name.rpartition(".")[0])):
            raise PlanError(
                f"{AUTOTP}: parameter {name!r} has a hook on its gradient, which dividing would drop: each rank then "
                "has a part of the gradient. Register the hook after initialize"
            )


def _has_no_values(parameter: nn.Parameter) -> bool:
    return parameter.is_meta or (is_resting(parameter) and unowned_shard_of(parameter) is None)


def _styles_of(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    styles = expanded(model, plan)
    if not styles:
        raise PlanError(
            f"{AUTOTP}: the plan that {type(model).__name__} brings names no layer of it; a model with adapters, or "
            f"inside of another one, can't be divided by it: leave {AUTOTP} out"
        )
    return styles


def _by_module(model: nn.Module, styles: Mapping[str, str]) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """A plan in pieces: the path of a module, and the styles of its parameters and of itself."""
    found: dict[str, dict[str, str]] = {}
    for name, style in styles.items():
        path, _, last = name.rpartition(".")
        own = path if last in model.get_submodule(path)._parameters else name
        found.setdefault(own, {})[name] = style
    return [((path,), some) for path, some in found.items()]


def _take_whole(model: nn.Module, paths: Iterable[str]) -> None:
    """Gather the parameters of modules that ranks share already (zero.Init): all of them, one after the other.

    A parameter of several names stays one.
    """
    made: dict[int, nn.Parameter] = {}
    for path in paths:
        for parameter in model.get_submodule(path).parameters(recurse=False):
            if is_resting(parameter) and id(parameter) not in made:
                whole = take_whole(parameter).to(parameter.dtype)
                made[id(parameter)] = own = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                vars(own).update(_written_on(parameter))
    for module in model.modules() if made else ():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = made.get(id(parameter), parameter)


def _applying() -> Callable[..., object]:
    """What transformers applies a plan with. Raises PlanError where this transformers has it not."""
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise PlanError(
            f"{AUTOTP}: the model's plan is applied by transformers 5.24 or later, and the one that is installed can't "
            f"({error}). Load the model with tp_plan='auto', name its layers in {SPECS}, or update transformers"
        ) from error
    return apply_tensor_parallelism

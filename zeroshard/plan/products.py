"""Chooses the layers of a model that multiply in fp8 and adds them to a recipe; used by the engine and the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.fp8.convert import Choice, choose, products_of
from zeroshard.plan.builder import Recipe
from zeroshard.plan.dtypes import LOW_PRECISION, dtype_name


def with_products(recipe: Recipe, model: nn.Module) -> tuple[Recipe, Sequence[Choice]]:
    """The recipe with the chosen layers, and the choice for each layer.

    Raises:
        PlanError: a name that no layer has, or a model that computes in float32.
    """
    wanted = recipe.precision.matmul
    if wanted is None:
        return recipe, ()
    if recipe.precision.param is None:
        low = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())
    else:
        low = dtype_name(recipe.precision.param) in LOW_PRECISION
    if not low:
        raise PlanError("fp8: the model computes in float32; compute in bf16 (bf16.enabled, Precision(param='bf16'))")
    converted = recipe.precision.param is not None
    choices = choose(model, wanted, recipe.precision.keep_fp32, converted=converted)
    return replace(recipe, policy=replace(recipe.policy, products=products_of(wanted, choices))), choices

"""torchao's fp8 layers, which accelerate puts into a model before it comes here (`AORecipeKwargs`).

    Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config, module_filter_func)])
    prepare(model, optimizer)      swaps the layers that the filter names, and wraps their weights for gathers of FSDP2
    deepspeed.initialize           makes them plain layers again, with the weights that the optimizer has; the section
                                   `fp8` of the config names them, with the recipe of torchao's config

So weights rest and are gathered in fp8, where torchao's layers would be given weights in bf16. Rejected: wrapped
weights as parameters; they are tensors made of others, and an optimizer that was made before does not have them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeroshard.errors import UsageError

_LAYERS, _WEIGHTS = "torchao.float8.float8_linear", "torchao.float8.fsdp_utils"
_ATTRIBUTES = (
    "config",
    "linear_mm_config",
    "scaling_type_input",
    "scaling_type_weight",
    "scaling_type_grad_output",
)
_KINDS = {
    ("tensorwise", torch.float8_e4m3fn, torch.float8_e5m2): "tensorwise",
    ("axiswise", torch.float8_e4m3fn, torch.float8_e4m3fn): "rowwise",
}
"""zeroshard's recipes, by granularity of scales, format of inputs and weights, and format of gradients."""


def take_over(model: nn.Module, section: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Make torchao's layers of a model plain, and the section `fp8` that converts them; None if there are none.

    Args:
        section: the section `fp8` of the config.

    Raises:
        UsageError: the config has fp8 of its own, or torchao's config has no counterpart.
    """
    module = sys.modules.get(_LAYERS)  # torchao need not be installed
    if module is None:
        return None
    layers: dict[str, Any] = {
        path: layer for path, layer in model.named_modules() if isinstance(layer, module.Float8Linear)
    }
    if not layers:
        return None
    if section is not None and section.get("enabled"):
        raise UsageError(
            "fp8 is asked for twice, in the section 'fp8' of the config and by accelerate (mixed_precision='fp8', "
            "AORecipeKwargs): remove one of them"
        )
    kinds = {
        (_recipe(path, layer.config), layer.config.enable_fsdp_float8_all_gather) for path, layer in layers.items()
    }
    if len(kinds) > 1:
        raise UsageError("torchao's fp8 layers of this model have several configs: give all of them one")
    for layer in layers.values():
        _make_plain(layer)
    recipe, shards = kinds.pop()
    return {"enabled": True, "recipe": recipe, "filter": list(layers), "shards": shards}


def _recipe(path: str, config: Any) -> str:
    """The recipe that computes as torchao's config says. Raises UsageError if none does."""
    values = config.cast_config_input, config.cast_config_input_for_grad_weight
    weights = config.cast_config_weight, config.cast_config_weight_for_grad_input
    gradients = config.cast_config_grad_output, config.cast_config_grad_output_for_grad_weight
    casts = (*values, *weights, *gradients)
    scales = {cast.scaling_granularity.value for cast in casts}
    formats = {cast.target_dtype for cast in (*values, *weights)}, {cast.target_dtype for cast in gradients}
    dynamic = all(cast.scaling_type.value == "dynamic" for cast in casts)
    if dynamic and len(scales) == len(formats[0]) == len(formats[1]) == 1:
        found = _KINDS.get((scales.pop(), formats[0].pop(), formats[1].pop()))
        if found is not None:
            return found
    raise UsageError(
        f"torchao's config of layer {path!r} has no counterpart here (as its recipe 'rowwise_with_gw_hp' has none): "
        "give AORecipeKwargs Float8LinearConfig.from_recipe_name('tensorwise') or 'rowwise', or use the section 'fp8' "
        "of the config and mixed_precision='bf16'"
    )


def _make_plain(layer: nn.Linear) -> None:
    """Make one of torchao's layers an nn.Linear with the parameter that it had before."""
    weight: Any = layer.weight
    if isinstance(weight, sys.modules[_WEIGHTS].WeightWithDynamicFloat8CastTensor):
        layer.weight = weight._tensor  # the parameter that was wrapped, which the optimizer has
    layer.__class__ = nn.Linear
    for name in _ATTRIBUTES:
        vars(layer).pop(name, None)

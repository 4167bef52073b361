"""The plan of tensor parallelism that a transformers model brings, as the planner and a division read it.

Nothing here knows any model, or divides one (see tensor_division).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from zeroshard.errors import PlanError
from zeroshard.sharding.dtensors import as_dtensor

AUTOTP = "tensor_parallel.autotp_size"
SPECS = "tensor_parallel.partition_config"
_HEADS = ("num_attention_heads", "num_key_value_heads")


def check_heads(model: nn.Module, ranks: int) -> None:
    """Each rank has whole heads. Raises PlanError with the numbers."""
    config = getattr(model, "config", None)
    text_of = getattr(config, "get_text_config", None)
    text = text_of() if callable(text_of) else config
    for name in _HEADS:
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise PlanError(
                f"{AUTOTP} {ranks}: the model's {name} is {heads}, which {ranks} ranks do not divide; choose a divisor"
            )


def own_plan(model: nn.Module) -> Mapping[str, str]:
    """The plan of a transformers model. Raises PlanError for a model that has none."""
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise PlanError(
            f"{AUTOTP}: {type(model).__name__} brings no plan of tensor parallelism (a base_model_tp_plan); "
            f"name its layers in {SPECS}, or divide it with torch's parallelize_module before"
        )
    return plan


def expanded(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan with the numbers of layers in place of `*`: each parameter before its module, as transformers wants it.

    Modules of experts that are divided over ranks of their own are left out: they have them whole.
    """
    found: dict[str, str] = {}
    first_names = {name for name, _ in model.named_parameters()}
    for path, module in model.named_modules():
        if any(as_dtensor(parameter) is not None for parameter in module.parameters(recurse=False)):
            continue
        style = plan.get(_general(path))
        for name, _ in module.named_parameters(recurse=False):
            whole = f"{path}.{name}" if path else name
            own = plan.get(_general(whole), style)
            if own is not None and whole in first_names:
                found[whole] = own
        if style is not None and path:
            found[path] = style
    return found


def _general(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)

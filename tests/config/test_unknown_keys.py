"""A key that nobody knows is an error with its path and the nearest known key."""

from __future__ import annotations

from typing import Any

import pytest

from zeroshard.config import load_config
from zeroshard.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize(
    ("config", "path", "suggestion"),
    [
        ({"stage": 3}, "stage", "did you mean zero_optimization.stage?"),
        ({"overlap_comm": True}, "overlap_comm", "did you mean zero_optimization.overlap_comm?"),
        ({"reduce_bucket_size": 5e8}, "reduce_bucket_size", "did you mean zero_optimization.reduce_bucket_size?"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "did you mean zero_optimization?"),
        ({"zero_optimization": {"stag": 3}}, "zero_optimization.stag", "did you mean zero_optimization.stage?"),
        (
            {"zero_optimization": {"stage3_prefetch_bucket": 1}},
            "zero_optimization.stage3_prefetch_bucket",
            "did you mean zero_optimization.stage3_prefetch_bucket_size?",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "none"}}},
            "zero_optimization.offload_optimizer.devise",
            "did you mean zero_optimization.offload_optimizer.device?",
        ),
        (
            {"zero_optimization": {"gradient_clipping": 1}},
            "zero_optimization.gradient_clipping",
            "did you mean gradient_clipping at the top level?",
        ),
        ({"lr": 1e-4}, "lr", "did you mean optimizer.params.lr?"),
        ({"optimizer": {"betas": [0, 1]}}, "optimizer.betas", "did you mean optimizer.params.betas?"),
        ({"xyzzy": 1}, "xyzzy", "the nearest known key is"),
        ({"zero": {"stage": 3}}, "zero", "zero_optimization?"),
        ({"flops": {"enabled": True}}, "flops", "did you mean flops_profiler?"),
        ({"fp32": {"enabled": True}}, "fp32", "the nearest known key is fp8;"),
        ({"bf16": {"enable": True}}, "bf16.enable", "did you mean bf16.enabled?"),
        ({"optimizer": {"typ": "Adam"}}, "optimizer.typ", "did you mean optimizer.type?"),
        ({"zero_optimization.stage": 3}, '["zero_optimization.stage"]', '"zero_optimization": {"stage": ...}'),
        (
            {"nebula": {"enabled": False, "persistent": 1}},
            "nebula.persistent",
            "nebula knows enable_nebula_load, enabled",
        ),
    ],
)
def test_an_unknown_key_names_its_path_and_the_nearest_key(config: dict[str, Any], path: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**BATCH, **config}, world_size=1)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path} (config): unknown key")
    assert suggestion in problem


def test_all_problems_are_reported_at_once() -> None:
    config = {"stage": 3, "bf16": {"enabled": "true"}, "optimizer": {"type": "Adma"}, "gradient_clipping": -1}
    with pytest.raises(ConfigError) as caught:
        load_config(config, world_size=1)
    found = {problem.split(" (")[0].split(":")[0] for problem in caught.value.problems}
    assert found == {"stage", "bf16.enabled", "optimizer.type", "gradient_clipping", "train_micro_batch_size_per_gpu"}
    assert str(caught.value).startswith("5 problems in the config:")


@pytest.mark.parametrize("value", [True, "bf16", [1], 3])
def test_a_section_that_is_no_object_is_refused_with_an_example(value: Any) -> None:
    with pytest.raises(ConfigError, match=r'bf16 \(config\): must be an object such as \{"enabled": true\}'):
        load_config({**BATCH, "bf16": value}, world_size=1)

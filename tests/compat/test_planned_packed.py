"""The planner's units of a base in 4 bits with LoRA are those of bitsandbytes and peft: `ZEROSHARD_HF_TESTS=1`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.packed_model import Width, adapted, base, write
from tests.support.installed import need
from zeroshard.planner.trace.sources import find_source, with_adapter
from zeroshard.planner.trace.workload import Workload
from zeroshard.sharding.units import UnitSpec, find_units

need("transformers", "peft", "bitsandbytes")
pytestmark = pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")

WIDE = Width(hidden=1024, heads=8, kv_heads=2, ffn=16_384, vocabulary=64, layers=2)
"""Wide enough for scales of scales that are sharded."""


def _sizes(units: list[UnitSpec]) -> dict[str, list[tuple[str, tuple[int, ...], torch.dtype, bool, bool]]]:
    return {
        unit.name: sorted(
            # The planner casts as the plan says, so the dtypes of plain parameters are those of the plan.
            (spec.name, spec.shape, spec.dtype if spec.packed else torch.bfloat16, spec.trainable, spec.packed)
            for spec in unit.parameters
        )
        for unit in units
    }


def test_units_are_those_of_the_real_model(tmp_path: Path) -> None:
    device = torch.device("cpu")
    write(tmp_path, WIDE, 64)
    planned = Workload(with_adapter(find_source(str(tmp_path)), tmp_path), 1, 64).units
    made = find_units(adapted(base(WIDE, 64, device, torch.bfloat16), device))
    assert _sizes(planned) == _sizes(made)
    assert any(spec.name.endswith("_weight_state2_absmax") for unit in planned for spec in unit.parameters)

"""Checkpoints of DeepSpeed 0.19.8 open with exactly what DeepSpeed held.

The fixtures are made by `tests/checkpoint/deepspeed/make_fixtures.py`, which says how.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zeroshard.checkpoint.foreign.contents import Contents
from zeroshard.checkpoint.foreign.deepspeed import find, open_deepspeed

CHECKPOINTS = Path(__file__).parent / "deepspeed" / "checkpoints"
CASES = sorted(path.name for path in CHECKPOINTS.iterdir())
MOMENTS = ("exp_avg", "exp_avg_sq")


def opened(case: str) -> Contents:
    folder = find(CHECKPOINTS / case)
    assert folder is not None
    return open_deepspeed(folder)


def truth(case: str) -> dict[str, torch.Tensor]:
    return load_file(CHECKPOINTS / case / "truth.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_master_weights_and_moments_are_those_that_deepspeed_held(case: str) -> None:
    contents, expected = opened(case), truth(case)
    trained = {name.removesuffix("|fp32") for name in expected if name.endswith("|fp32")}
    assert trained == {name for name, parameter in contents.parameters.items() if parameter.trainable}
    for name in trained:
        parameter = contents.parameters[name]
        assert torch.equal(parameter.weight.read(), expected[f"{name}|fp32"]), name
        assert sorted(parameter.moments) == sorted(MOMENTS)
        for key in MOMENTS:
            assert torch.equal(parameter.moments[key].read(), expected[f"{name}|{key}"]), (name, key)
        assert parameter.step == 3
        compute = expected[f"{name}|compute"]
        assert torch.equal(parameter.weight.read().to(compute.dtype), compute)


@pytest.mark.parametrize("case", CASES)
def test_frozen_empty_and_tied_parameters_and_buffers_are_complete(case: str) -> None:
    contents, expected = opened(case), truth(case)
    names = {name.removesuffix("|compute") for name in expected if name.endswith("|compute")}
    assert set(contents.parameters) == names
    for name, parameter in contents.parameters.items():
        if not parameter.trainable:
            assert torch.equal(parameter.weight.read(), expected[f"{name}|compute"]), name
            assert not parameter.moments
    assert contents.aliases == {"head.weight": "embed.weight"}
    assert set(contents.buffers) == {"seen", "mean"}
    for name, buffer in contents.buffers.items():
        assert torch.equal(buffer.read(), expected[f"{name}|buffer"])


@pytest.mark.parametrize("case", CASES)
def test_counters_groups_and_client_state_are_kept(case: str) -> None:
    contents = opened(case)
    facts = json.loads((CHECKPOINTS / case / "truth.json").read_text())
    assert (contents.steps, contents.skipped, contents.samples) == (facts["steps"], facts["skipped"], facts["samples"])
    assert contents.scheduler == facts["scheduler"]
    assert contents.client_state == {"epoch": 2, "note": "from the caller"}
    assert [group.options["lr"] for group in contents.groups] == facts["lr"]
    assert [group.options["weight_decay"] for group in contents.groups] == [0.1, 0.0]
    assert {name for group in contents.groups for name in group.names} | {"empty"} == {
        name for name, parameter in contents.parameters.items() if parameter.trainable
    } | {"empty"}
    assert set(contents.groups[0].names) == {"embed.weight", "first.weight", "second.weight"}
    if "zero1" in case and "bf16" not in case:
        assert contents.scaler is not None
        assert (contents.scaler.scale, contents.scaler.dynamic) == (facts["scale"], True)
        assert contents.scaler.since_overflow == facts["steps"]
    else:
        assert contents.scaler is None
    assert contents.left_out == ()


@pytest.mark.parametrize("case", ["zero2", "zero3"])
def test_any_flat_range_of_a_tensor_can_be_read_alone(case: str) -> None:
    for parameter in opened(case).parameters.values():
        whole = parameter.weight.read().reshape(-1)
        for start, stop in [(0, 0), (0, len(whole)), (len(whole) // 3, len(whole) - len(whole) // 4)]:
            assert torch.equal(parameter.weight.read_flat(start, stop), whole[start:stop])

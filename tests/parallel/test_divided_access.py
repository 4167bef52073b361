"""Parameters that the model divides, read and written outside of a step: what users of DTensors expect."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.parallel_model import WIDTH, Layout, build, sharded, tokens, train
from zeroshard.errors import UsageError


def _weight(model: nn.Module, name: str) -> nn.Parameter:
    return model.get_parameter(name)


def _whole_values(rank: int, world: int, stage: int) -> None:
    layout, started = Layout(world // 2, 2, stage), build().state_dict()
    model, optimizer = sharded(layout)
    for name in ("blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight", "blocks.0.mlp.down.bias", "norm.weight"):
        parameter, whole = _weight(model, name), started[name]
        assert tuple(parameter.shape) == whole.shape
        assert torch.equal(zeroshard.safe_get_full_fp32_param(parameter), whole)
        zeroshard.safe_set_full_fp32_param(parameter, whole * 2)
        assert torch.equal(zeroshard.safe_get_full_fp32_param(parameter), whole * 2)
        zeroshard.safe_set_local_fp32_param(parameter, zeroshard.safe_get_local_fp32_param(parameter) / 2)
        assert torch.equal(zeroshard.full_state_dict(model).get(name, whole), whole)
        with zeroshard.GatheredParameters(parameter):
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(value, whole)
        with zeroshard.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            parameter.mul_(2)
        assert torch.equal(zeroshard.safe_get_full_fp32_param(parameter), whole * 2)
        zeroshard.safe_set_full_fp32_param(parameter, whole)
    model(tokens(0, 0)[:, :-1]).square().mean().backward()
    parameter = _weight(model, "blocks.1.mlp.down.weight")
    gradient = zeroshard.safe_get_full_grad(parameter)
    assert gradient is not None
    assert gradient.shape == (WIDTH, 2 * WIDTH)
    zeroshard.safe_set_full_grad(parameter, gradient * 3)
    changed = zeroshard.safe_get_full_grad(parameter)
    assert changed is not None
    torch.testing.assert_close(changed, gradient * 3)
    with pytest.raises(UsageError, match="gradients of this model are sharded"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    moment = zeroshard.safe_get_full_optimizer_state(parameter, "exp_avg")
    assert moment is not None
    assert moment.shape == (WIDTH, 2 * WIDTH)
    train(model, optimizer, layout.reader, range(1))
    zeroshard.close(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_values_are_read_and_written(stage: int) -> None:
    run_ranks(4 if stage == 3 else 2, _whole_values, stage)


def _at_rest(rank: int, world: int) -> None:
    model, _ = sharded(Layout(2, 2, 3))
    parameter = _weight(model, "blocks.0.mlp.up.weight")
    assert isinstance(parameter, DTensor)
    assert parameter.shape == (2 * WIDTH, WIDTH)
    assert parameter.numel() == 0
    for call in (parameter.full_tensor, parameter.to_local, parameter.norm):
        with pytest.raises(UsageError, match=r"'blocks.0.mlp.up.weight' are not here"):
            call()
    with pytest.raises(UsageError, match=r"parameter .* is sharded and empty here"):
        model.state_dict()
    before = zeroshard.full_state_dict(model)
    zeroshard.close(model)
    again, _ = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=1)
    after = zeroshard.full_state_dict(again)
    assert all(torch.equal(before[name], after[name]) for name in before)
    state = again.state_dict()
    assert state["blocks.0.mlp.up.weight"].full_tensor().shape == (2 * WIDTH, WIDTH)
    zeroshard.close(again)


def test_values_at_rest_are_refused_and_survive_a_close() -> None:
    run_ranks(4, _at_rest)

"""`zero.Init` and `GatheredParameters` beyond their manuals: parameters before there is an engine, and beside one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import zeroshard
from tests.compat.small import ADAMW, CONFIG, Net, deepspeed, same_values, small_net, start, train, whole_values
from tests.support.distributed import run_ranks
from zeroshard.errors import ZeroShardWarning


def _init_shards(rank: int, world: int) -> None:
    expected = dict(small_net().state_dict())
    torch.set_default_dtype(torch.bfloat16)  # what the config says counts, not torch's default
    try:
        torch.manual_seed(0)
        with deepspeed.zero.Init(
            config_dict_or_path={**CONFIG, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
        ):
            with deepspeed.zero.Init():  # a model built inside of another one
                built = Net()
            assert built.head.weight.shape == (3, 8)
            identity, shape = built.head.weight.ds_id, built.head.weight.ds_shape
        assert (built.head.weight.ds_id, built.head.weight.ds_shape) == (identity, shape)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in built.parameters()} == {torch.float32}
    with deepspeed.zero.Init(config_dict_or_path={"bf16": {"enabled": True}}):
        low = Net()
    assert {parameter.dtype for parameter in low.parameters()} == {torch.bfloat16}
    with deepspeed.zero.Init(config_dict_or_path={}):
        torch.manual_seed(0)
        model = Net()
    identities = [id(parameter) for parameter in model.parameters()]
    for parameter in model.parameters():
        assert parameter.numel() == 0
        assert parameter.shape == (0,)
        assert not parameter.is_meta
        assert parameter.ds_numel == math.prod(parameter.ds_shape)
        assert parameter.partition_numel() == -(-parameter.ds_numel // world)
        assert parameter.ds_status != deepspeed.zero.ZeroParamStatus.AVAILABLE
    assert not model.blocks[0].scale.is_meta
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert all(p.ds_status == deepspeed.zero.ZeroParamStatus.AVAILABLE for p in model.parameters())
    assert same_values(whole_values(model), {n: t for n, t in expected.items() if "scale" not in n})
    with deepspeed.zero.GatheredParameters([model.head.weight], modifier_rank=1):
        if rank == 1:
            with torch.no_grad():
                model.head.weight.fill_(2.0)
    assert torch.equal(whole_values(model)["head.weight"], torch.full((3, 8), 2.0))
    with pytest.warns(ZeroShardWarning, match=r"'head.weight' was changed .* without modifier_rank, and has its old"):
        with deepspeed.zero.GatheredParameters(model.head.weight), torch.no_grad():
            model.head.weight.fill_(7.0)
    before = whole_values(model)
    assert torch.equal(before["head.weight"], torch.full((3, 8), 2.0))
    one = nn.Module()
    one.value = nn.Parameter(torch.tensor(1.5))
    deepspeed.zero.Init(module=one)
    assert one.value.numel() == 0
    assert one.value.item() == 1.5
    engine, *_ = start(model)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert same_values(whole_values(model), before)
    train(engine, rank, 2)
    assert not same_values(whole_values(model), before)


def _gathered(rank: int, world: int) -> None:
    plain, buffer = nn.Parameter(torch.ones(3)), torch.zeros(2)
    for sharded_by_engine in (False, True):
        with deepspeed.zero.Init(config_dict_or_path={}, enabled=not sharded_by_engine):
            model = small_net()
        if sharded_by_engine:
            start(model)
        gathered = deepspeed.zero.GatheredParameters
        weight = model.head.weight
        before = whole_values(model)
        for members in (weight, [weight], (weight, weight), (p for p in [weight]), filter(None.__ne__, [weight, None])):
            with gathered(members):
                assert weight.shape == (3, 8)
            assert weight.numel() == 0
        with gathered([weight, None, plain, buffer], modifier_rank=0):
            assert weight.shape == (3, 8)
        for nothing in ([], [None], [plain], None, [buffer]):
            with gathered(nothing, modifier_rank=0):
                pass
        with gathered([weight], enabled=False):
            assert weight.numel() == 0
        # One rank opens an inner block by itself, as weight initialisation does; the outer one keeps the changes.
        with gathered(model.parameters(), modifier_rank=0):
            if rank == 0:
                with gathered([weight, model.head.bias], modifier_rank=0), torch.no_grad():
                    weight.zero_()
            assert weight.shape == (3, 8)
        after = whole_values(model)
        assert not after["head.weight"].any()
        assert same_values({**after, "head.weight": before["head.weight"]}, before)
        # Overlapping blocks: the first to come holds the parameter to its own end.
        first, second = gathered([weight]), gathered([weight, model.head.bias])
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert model.head.bias.shape == (3,)
        second.__exit__(None, None, None)
        assert weight.numel() == model.head.bias.numel() == 0
        copied = None
        with gathered(model.head.parameters(), modifier_rank=0):
            copied = __import__("copy").deepcopy(nn.ParameterList([weight])) if not sharded_by_engine else None
        if copied is not None:  # an ordinary parameter, as adapters that train a copy of a module want it
            assert copied[0].shape == (3, 8)
            assert not hasattr(copied[0], "ds_id")


def _whole_at(stage: int, rank: int) -> None:
    """Where each rank has the whole parameter DeepSpeed's block does nothing, so a change inside of it stays."""
    for bf16 in (False, True):
        model = small_net()
        config = {**CONFIG, "zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}, "optimizer": ADAMW}
        engine, *_ = start(model, config)
        with deepspeed.zero.GatheredParameters(model.head.weight), torch.no_grad():
            model.head.weight.fill_(2.0)
        assert torch.equal(whole_values(model)["head.weight"].float(), torch.full((3, 8), 2.0))
        train(engine, rank, 1)
        assert 1.5 < float(zeroshard.safe_get_full_fp32_param(model.head.weight).mean()) < 2.5
        engine.destroy()


def _all(rank: int, world: int) -> None:
    _init_shards(rank, world)
    _gathered(rank, world)
    for stage in (0, 1, 2):
        _whole_at(stage, rank)


def test_parameters_outside_of_an_engine_behave_as_the_libraries_expect() -> None:
    run_ranks(2, _all)

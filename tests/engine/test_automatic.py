"""plan="auto" and "stage": "auto": the choice follows what is free, is one for all ranks, and says why."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from benchmarks.llama import SIZES, Llama
from tests.support.distributed import run_ranks
from zeroshard.engine.automatic import choose, example_of
from zeroshard.errors import PlanError, ZeroShardError
from zeroshard.plan.placement import StateKind, Tier
from zeroshard.plan.plan import Plan
from zeroshard.planner.predict.tiers import Offload
from zeroshard.sharding.units import find_units

MB = 10**6
IDS = torch.zeros(2, 64, dtype=torch.int64)
pytestmark = pytest.mark.filterwarnings("ignore::zeroshard.errors.ZeroShardWarning")


def _placed(plan: Plan) -> tuple[bool, bool, bool, bool]:
    """Whether parameters and gradients are divided, and moments and parameters are on the host."""
    group = plan.units[-1].groups[0]  # what goes to the host goes from the end
    assert group.grad is not None
    assert group.moments is not None
    divided = (group.param.divided, group.grad.divided)
    return *divided, group.moments.tier is Tier.HOST, group.placement(StateKind.PARAM).tier is Tier.HOST  # type: ignore[union-attr]


def _shard(**fields: Any) -> Plan:
    """The plan that is chosen for the tiny model; it must train."""
    model = Llama(SIZES["tiny"])
    auto = zeroshard.AutoPlan(**fields)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=auto)
    model(IDS, IDS).backward()
    optimizer.step()
    plan = zeroshard.plan_of(model)
    zeroshard.close(model)
    return plan


def _initialize(model: nn.Module, zero: dict[str, Any], data: Any = None) -> Plan:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": "auto", **zero},
    }
    engine, *_ = zeroshard.initialize(model=model, config=config, training_data=data)
    plan = engine.plan
    engine.destroy()
    return plan


def _choices(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"reasons": []}
    seen = logging.Handler()
    seen.emit = lambda record: found["reasons"].append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zeroshard")
    logger.setLevel(logging.INFO)
    logger.addHandler(seen)
    example = (IDS, IDS)
    found["room"] = _placed(_shard(example=example, device_memory=1000 * MB))
    # What one rank lacks binds all: the least of both is what is planned for.
    found["least"] = _placed(_shard(example=example, device_memory=(1000 if rank else 72.5) * MB))
    found["little"] = _placed(_shard(example=example, device_memory=48 * MB))
    some = _shard(example=example, device_memory=60 * MB)
    found["on host"] = [group.updated_off_device for _, group in some.groups() if group.trainable]
    for name, limit in (("nothing", 5), ("smaller", 70), ("checkpointing", 65)):
        with pytest.raises(PlanError) as refused:
            _shard(example=example, device_memory=limit * MB, offload=False)
        found[name] = str(refused.value)
    with pytest.raises(PlanError):
        _shard(example=example, device_memory=(1000 if rank else 5) * MB, offload=False)
    data = [{"ids": IDS[0], "targets": IDS[0]} for _ in range(8)]
    found["config"] = _placed(_initialize(Llama(SIZES["tiny"]), {}, data))
    little = {"automatic": {"device_memory": 48 * MB}}
    found["config, little"] = _placed(_initialize(Llama(SIZES["tiny"]), little, data))
    with pytest.raises(PlanError, match=r"nothing fits.*Offload was not tried, since it is forbidden"):
        _initialize(Llama(SIZES["tiny"]), {**little, "offload_optimizer": {"device": "none"}}, data)
    fixed = {"automatic": {"device_memory": 60 * MB}, "offload_optimizer": {"device": "cpu", "ratio": 0.9}}
    _initialize(Llama(SIZES["tiny"]), fixed, data)
    found["unknown forward"] = _placed(_initialize(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), {}))
    dist.barrier()
    return found


def test_all_ranks_choose_the_same_by_what_the_least_of_them_has_free() -> None:
    first, second = run_ranks(2, _choices)
    reasons = first.pop("reasons")
    assert second.pop("reasons") == []
    assert first == second
    assert first["room"] == (False, False, False, False)
    assert first["least"] == (True, True, False, False)
    assert first["little"] == (False, True, True, False)
    assert set(first["on host"]) == {True, False}, "as much as fits stays on the device"
    assert "Cheapest change: more ranks" in first["nothing"]
    assert "Cheapest change: a micro-batch of 1 and 2 times the accumulation with stage 3" in first["smaller"]
    assert "Cheapest change: activation checkpointing with stage 3" in first["checkpointing"]
    assert first["config"] == (False, False, False, False)
    assert first["config, little"] == first["little"]
    assert first["unknown forward"] == (False, False, False, False)
    assert "stage 1 takes" in reasons[0]
    assert "traced with the example batch" in reasons[0]
    assert any("traced with the first samples of the training data" in reason for reason in reasons)
    assert "40% are left to activations" in reasons[-1]
    assert "offload cpu of 90% of the optimizer's state" in reasons[-2], "a ratio that the config fixes is the share"


@pytest.mark.parametrize("plan", ["automatic", "3", "", None, True, 2.0, (3,)])
def test_a_word_that_is_no_plan_is_refused(plan: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="'auto'"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=plan)


@pytest.mark.parametrize(
    "given",
    [{"device_memory": "8GB"}, {"device_memory": True}, {"device_memory": 0.5}, {"recipe": 3}, {"offload": "no"}],
)
def test_a_bound_that_is_no_number_of_bytes_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ZeroShardError, match=rf"AutoPlan\({next(iter(given))}="):
        zeroshard.AutoPlan(**given)


def test_batches_are_taken_as_the_forward_takes_them() -> None:
    for batch in ({"ids": IDS}, (IDS,), IDS):
        found = example_of(batch)
        assert found is not None
        assert found.samples == 2
        assert len(found.args) + len(found.kwargs) == 1


def test_a_model_that_cannot_be_traced_leaves_room_for_activations_and_says_so(caplog: Any) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * float(x.sum())

    model = Reads()
    with caplog.at_level(logging.INFO, "zeroshard"):
        auto = zeroshard.AutoPlan(example=torch.zeros(2, 4))
        model, _ = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=auto)
    zeroshard.close(model)
    assert "can't be traced with the example batch" in caplog.text
    assert find_units(model)


class _Odd(Exception):
    """No error that anybody has thought of."""


class _Raising(nn.Module):
    """Its forward, or the data that it is for, raise what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise _Odd("not without values")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        raise OSError("no such file") if dist.get_rank() else _Odd("no such sample")


def _raising(rank: int, world_size: int) -> None:
    model = _Raising()
    model, _ = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=zeroshard.AutoPlan(example=IDS))
    zeroshard.close(model)
    _initialize(_Raising(), {}, _Raising())

    def make(stage: int, offload: Offload, more: bool, share: float) -> Plan:
        raise _Odd("no plan")

    with pytest.raises(PlanError, match="auto: _Odd: no plan") as raised:
        choose(model, find_units(_Raising()), make, None, torch.device("cpu"))
    assert isinstance(raised.value.__cause__, _Odd) == (rank == 0)


def test_what_a_model_or_its_data_raise_on_one_rank_lets_no_other_wait() -> None:
    run_ranks(2, _raising, timeout=60)

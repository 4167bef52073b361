"""The warm-up schedules give the values of tables worked out by hand, and go on from a saved index."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from zeroshard.errors import ConfigError, UsageError, ZeroShardWarning
from zeroshard.optim.schedules.named import build_scheduler
from zeroshard.optim.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR


def sgd(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def run(scheduler: LRScheduler, steps: int) -> list[float]:
    """The first group's rate at construction and after each of `steps` batches."""
    seen = [rates(scheduler.optimizer)[0]]
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        seen.append(rates(scheduler.optimizer)[0])
    return seen


def near(values: list[float]) -> object:
    return pytest.approx(values, rel=1e-12, abs=1e-15)


# In every table: the rate at construction (index -1), then after the batches 0, 1, 2, ...


def test_linear_warmup_starts_at_the_minimum_twice_and_reaches_the_maximum() -> None:
    table = [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0]
    assert run(WarmupLR(sgd(9), 1.0, 5.0, 4, "linear"), 6) == near(table)


def test_log_warmup_is_the_default_and_reaches_the_maximum_one_batch_early() -> None:
    # log base 4 of 1, 2, 3, 4
    table = [0.0, 0.0, 0.5, math.log(3) / math.log(4), 1.0, 1.0, 1.0]
    assert run(WarmupLR(sgd(9), 0.0, 1.0, 4), 6) == near(table)


def test_decay_falls_in_a_line_to_the_minimum_at_the_total_and_stays() -> None:
    table = [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    assert run(WarmupDecayLR(sgd(9), 6, 0.0, 1.0, 2, "linear"), 9) == near(table)


def test_decay_ends_at_a_minimum_that_is_not_zero() -> None:
    assert run(WarmupDecayLR(sgd(9), 4, 0.2, 1.0, 2, "linear"), 5) == near([0.2, 0.2, 0.6, 1.0, 0.6, 0.2])


def test_cosine_scales_the_rate_of_the_group_and_is_over_with_the_last_batch() -> None:
    half, r = 0.5, math.sqrt(0.5)
    # index 2 to 5 of 6: a quarter, a half, three quarters and the whole of the fall
    table = [0.0, 0.0, 5.0, 5 + 5 * r, 10 * half, 5 - 5 * r, 0.0, 0.0, 0.0]
    scheduler = WarmupCosineLR(sgd(10), 6, warmup_num_steps=2, cos_min_ratio=0.0, warmup_type="linear")
    assert run(scheduler, 8) == near(table)


def test_cosine_keeps_its_floor_after_the_end_and_rises_from_its_own_minimum() -> None:
    scheduler = WarmupCosineLR(sgd(10), 4, 0.2, 2, 0.1, "linear")
    # 0 before the first batch whatever warmup_min_ratio says; then 0.2, 0.6; then 0.55 and 0.1 for good
    assert run(scheduler, 7) == near([0.0, 2.0, 6.0, 5.5, 1.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_a_warmup_of_one_step_counts_as_two(kind: str) -> None:
    assert run(WarmupLR(sgd(9), 0.0, 1.0, 1, kind), 5) == run(WarmupLR(sgd(9), 0.0, 1.0, 2, kind), 5)


def test_no_warmup_means_full_rate_from_the_first_batch() -> None:
    assert run(WarmupLR(sgd(9), 0.0, 1.0, 0), 3) == [1.0] * 4
    assert run(WarmupDecayLR(sgd(9), 4, 0.0, 1.0, 0), 5) == near([1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    fall = run(WarmupCosineLR(sgd(1), 2, warmup_num_steps=0, cos_min_ratio=0.0), 3)
    assert fall == near([1.0, 0.5, 0.0, 0.0])


def test_the_maximum_is_the_rate_of_each_group_unless_given() -> None:
    optimizer = sgd(0.1, 0.3)
    run(WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear"), 3)
    assert rates(optimizer) == near([0.1, 0.3])
    optimizer = sgd(0.1, 0.3)
    run(WarmupDecayLR(optimizer, 9, warmup_num_steps=2, warmup_type="linear"), 3)
    assert rates(optimizer) == near([0.001, 0.001])


def test_each_group_has_its_own_minimum_and_maximum() -> None:
    optimizer = sgd(9, 9)
    scheduler = WarmupLR(optimizer, [0.0, 1.0], [4.0, 3.0], 4, "linear")
    assert rates(optimizer) == [0.0, 1.0]
    run(scheduler, 3)
    assert rates(optimizer) == near([2.0, 2.0])
    optimizer = sgd(1, 2)
    run(WarmupCosineLR(optimizer, 6, warmup_num_steps=2, warmup_type="linear"), 2)
    assert rates(optimizer) == near([0.5, 1.0])


def test_a_total_below_the_warmup_warns_and_falls_to_the_end_after_it() -> None:
    with pytest.warns(ZeroShardWarning, match="total_num_steps 2 is less than warmup_num_steps 3"):
        scheduler = WarmupDecayLR(sgd(9), 2, 0.0, 1.0, 3, "linear")
    assert run(scheduler, 5) == near([0.0, 0.0, 1 / 3, 2 / 3, 0.0, 0.0])


def test_the_last_rate_is_known_before_the_first_step() -> None:
    assert WarmupLR(sgd(9), 0.25, 1.0, 4).get_last_lr() == [0.25]
    assert WarmupCosineLR(sgd(9), 8, warmup_num_steps=4).get_last_lr() == [0.0]


def test_the_ratio_of_the_cosine_is_that_of_the_rates() -> None:
    scheduler = WarmupCosineLR(sgd(4), 4, 0.2, 2, 0.1, "linear")
    assert scheduler.get_lr_ratio() == 0.0
    for _ in range(5):
        scheduler.optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [4 * scheduler.get_lr_ratio()]
    assert scheduler.get_lr_ratio() == 0.1


def test_a_rate_that_is_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(8.0)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    run(WarmupCosineLR(optimizer, 6, warmup_num_steps=2, warmup_type="linear"), 2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 4.0


MAKERS: list[Callable[[torch.optim.Optimizer], LRScheduler]] = [
    lambda optimizer: WarmupLR(optimizer, 0.1, 1.0, 4),
    lambda optimizer: WarmupDecayLR(optimizer, 9, 0.1, 1.0, 4),
    lambda optimizer: WarmupCosineLR(optimizer, 9, 0.1, 4),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_a_restored_schedule_goes_on_where_it_stopped(make: Callable[..., LRScheduler], cut: int) -> None:
    expected = run(make(sgd(2)), 11)
    first = make(sgd(2))
    run(first, cut)
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"last_batch_iteration": cut - 1}
    second = make(sgd(2))
    second.load_state_dict(state)
    assert second.get_last_lr() == expected[cut : cut + 1]
    assert run(second, 11 - cut) == expected[cut:]


@pytest.mark.parametrize("make", MAKERS)
def test_a_schedule_made_after_the_optimizer_was_restored_keeps_the_first_rate(
    make: Callable[..., LRScheduler],
) -> None:
    old = sgd(2)
    expected = run(make(old), 5)[-1]
    new = sgd(2)
    new.load_state_dict(old.state_dict())  # the group's rate is now that of the middle of the run
    scheduler = make(new)
    scheduler.load_state_dict({"last_batch_iteration": 4})
    assert rates(new) == [expected]


def test_a_schedule_can_start_or_jump_to_any_batch() -> None:
    expected = run(WarmupLR(sgd(9), 0.0, 1.0, 8), 5)
    optimizer = sgd(9)
    scheduler = WarmupLR(optimizer, 0.0, 1.0, 8, last_batch_iteration=2)
    assert rates(optimizer) == [expected[3]]
    optimizer.step()
    scheduler.step(4)
    assert rates(optimizer) == [expected[5]]


def test_the_state_of_another_scheduler_is_refused() -> None:
    with pytest.raises(UsageError, match="no 'last_batch_iteration'"):
        WarmupLR(sgd(1)).load_state_dict({"last_epoch": 3})


def test_a_config_builds_each_schedule_by_name() -> None:
    assert type(build_scheduler(sgd(1), "WarmupLR", {"warmup_max_lr": 0.1})) is WarmupLR
    assert type(build_scheduler(sgd(1), "WarmupDecayLR", {"total_num_steps": 2000})) is WarmupDecayLR
    for name in ("WarmupCosineLR", "Cosine"):
        assert type(build_scheduler(sgd(1), name, {"total_num_steps": 2000})) is WarmupCosineLR
    assert type(build_scheduler(sgd(1), "OneCycleLR", {"max_lr": 1.0, "total_steps": 9})) is OneCycleLR


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmUpLR", {}, r"scheduler\.type.*did you mean WarmupLR"),
        ("OneCycle", {}, r"scheduler\.params: OneCycle: missing .*cycle_min_lr"),
        ("ReduceLROnPlateau", {}, r"scheduler\.type: no scheduler 'ReduceLROnPlateau'"),
        ("WarmupLR", {"warmup_steps": 5}, r"scheduler\.params\.warmup_steps: .*did you mean warmup_num_steps"),
        ("WarmupCosineLR", {}, r"scheduler\.params: WarmupCosineLR: missing .*total_num_steps"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps must be an integer of 0 or more, got -1"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, "warmup_num_steps must be .* got 'auto'"),
        ("WarmupLR", {"warmup_type": "cubic"}, "warmup_type must be 'log' or 'linear', got 'cubic'"),
        ("WarmupLR", {"warmup_max_lr": [1.0, 2.0]}, "warmup_max_lr has 2 values but the optimizer has 1 groups"),
        ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps must be an integer of 1 or more, got 0"),
    ],
)
def test_a_config_that_names_no_schedule_says_what_is_wrong(name: str, params: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_scheduler(sgd(1), name, params)


def test_a_scripts_own_warm_up_of_an_unknown_type_is_logarithmic_with_a_warning() -> None:
    for kind in (WarmupLR, lambda *args, **kwargs: WarmupCosineLR(*args, 9, **kwargs)):
        with pytest.warns(ZeroShardWarning, match="'cubic' is neither 'log' nor 'linear'"):
            odd = kind(sgd(10), warmup_num_steps=4, warmup_type="cubic")
        assert odd.warmup_type == "log"
        assert run(odd, 6) == run(kind(sgd(10), warmup_num_steps=4, warmup_type="log"), 6)

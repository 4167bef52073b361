"""OneCycle and LRRangeTest give the values of tables worked out by hand, rate and momentum, and go on from an index."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zeroshard
from zeroshard.engine.step.attached import stepper_of
from zeroshard.errors import ConfigError, UsageError, ZeroShardWarning
from zeroshard.optim.adam.device_adam import DeviceAdam
from zeroshard.optim.schedules.cycle import LRRangeTest, OneCycle
from zeroshard.optim.schedules.named import build_scheduler

Row = tuple[float, float]


@pytest.fixture(autouse=True)
def _fail_on_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ZeroShardWarning)
        yield


def adam(groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 9.0} for _ in range(groups)])


def row(optimizer: torch.optim.Optimizer) -> Row:
    group = optimizer.param_groups[0]
    return float(group["lr"]), float(group["betas"][0] if "betas" in group else group["momentum"])


def run(scheduler: LRRangeTest | OneCycle, steps: int) -> list[Row]:
    """Rate and momentum of the first group at construction and after each of `steps` batches."""
    seen = [row(scheduler.optimizer)]
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        seen.append(row(scheduler.optimizer))
    return seen


def near(rows: list[Row]) -> list[object]:
    return [pytest.approx(item, rel=1e-12, abs=1e-15) for item in rows]


# In every table: at construction (index -1), then after the batches 0, 1, 2, ...


def test_a_cycle_rises_and_falls_and_the_momentum_mirrors_it() -> None:
    table = [
        (0.1, 0.8),  # before the first batch the momentum is at its minimum, as in DeepSpeed
        (0.2, 0.875),
        (0.3, 0.85),
        (0.4, 0.825),
        (0.5, 0.8),
        (0.4, 0.825),
        (0.3, 0.85),
        (0.2, 0.875),
        (0.1, 0.9),
        (0.1, 0.9),
        (0.1, 0.9),
    ]
    assert run(OneCycle(adam(), 0.1, 0.5, cycle_first_step_size=4), 10) == near(table)


def test_after_the_cycle_rate_and_momentum_decay() -> None:
    scheduler = OneCycle(
        adam(), 0.1, 0.5, 0.5, cycle_first_step_size=2, cycle_second_step_size=3, decay_step_size=2, decay_mom_rate=-0.1
    )
    table = [
        (0.1, 0.8),
        (0.3, 0.85),
        (0.5, 0.8),
        (0.1 + 0.4 * 2 / 3, 0.9 - 0.1 * 2 / 3),
        (0.1 + 0.4 / 3, 0.9 - 0.1 / 3),
        (0.1, 0.9),
        (0.1 / 1.25, 0.9 * 0.95),
        (0.1 / 1.5, 0.9 * 0.9),
        (0.1 / 1.75, 0.9 * 0.85),
        (0.1 / 2, 0.9 * 0.8),
    ]
    assert run(scheduler, 9) == near(table)


def test_stairs_are_climbed_when_their_height_is_reached() -> None:
    scheduler = OneCycle(
        adam(), 0.0, 1.0, cycle_first_step_size=10, cycle_second_step_size=7, cycle_first_stair_count=3,
        cycle_second_stair_count=7,
    )  # fmt: skip
    third = [0.0] * 3 + [1 / 3] * 3 + [2 / 3] * 3 + [1.0]
    down = [6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7, 0.0, 0.0]
    assert run(scheduler, 18)[1:] == near([(height, 0.9 - 0.1 * height) for height in third + down])


def test_the_second_half_takes_the_stairs_of_the_first_unless_it_has_its_own() -> None:
    shared = OneCycle(adam(), 0.0, 1.0, cycle_first_step_size=5, cycle_second_step_size=5, cycle_first_stair_count=3)
    heights = [0.0, 0.0, 0.0, 1 / 3, 2 / 3, 1.0, 2 / 3, 1 / 3, 1 / 3, 0.0, 0.0]
    # 2/5 and 1/5 lie below the first and above no stair: 0.4 * 3 = 1.2 reaches one, 0.2 * 3 = 0.6 none
    heights[2] = 1 / 3
    assert [rate for rate, _ in run(shared, 10)] == pytest.approx(heights, abs=1e-15)
    smooth = OneCycle(
        adam(), 0.0, 1.0, cycle_first_step_size=2, cycle_first_stair_count=1, cycle_second_stair_count=0
    )  # fmt: skip
    assert [rate for rate, _ in run(smooth, 4)] == [0.0, 0.0, 1.0, 0.5, 0.0]


def test_a_second_half_of_no_batches_falls_at_once() -> None:
    scheduler = OneCycle(adam(), 0.1, 0.5, cycle_first_step_size=2, cycle_second_step_size=0)
    assert run(scheduler, 3) == near([(0.1, 0.8), (0.3, 0.85), (0.1, 0.9), (0.1, 0.9)])


def test_without_a_decay_size_nothing_decays() -> None:
    scheduler = OneCycle(adam(), 0.1, 0.5, 7.0, cycle_first_step_size=1, decay_mom_rate=3.0)
    assert run(scheduler, 6)[2:] == near([(0.1, 0.9)] * 5)


def test_groups_have_their_own_bounds_and_adams_second_beta_becomes_099() -> None:
    optimizer = adam(2)
    run(OneCycle(optimizer, [0.0, 1.0], [4.0, 3.0], cycle_first_step_size=2), 1)
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 2.0]
    assert [group["betas"] for group in optimizer.param_groups] == [(pytest.approx(0.85), 0.99)] * 2


def test_each_group_may_have_its_own_momentum() -> None:
    optimizer = adam(2)
    scheduler = OneCycle(
        optimizer, 0.0, 1.0, cycle_first_step_size=2, cycle_min_mom=[0.8, 0.5], cycle_max_mom=[0.9, 0.7]
    )
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.99), (0.5, 0.99)]
    run(scheduler, 1)
    assert [group["betas"][0] for group in optimizer.param_groups] == pytest.approx([0.85, 0.6])
    assert scheduler.get_mom() == [group["betas"] for group in optimizer.param_groups]
    run(scheduler, 3)
    assert scheduler.get_mom() == [(pytest.approx(0.9), 0.99), (pytest.approx(0.7), 0.99)]


def test_get_mom_before_the_first_batch_is_where_the_cycle_starts() -> None:
    scheduler = OneCycle(adam(), 0.1, 0.5, cycle_first_step_size=2)
    assert scheduler.get_mom() == [(0.9, 0.99)]
    assert OneCycle(adam(), 0.1, 0.5, cycle_momentum=False).get_mom() is None


def test_momentum_is_left_alone_when_asked_and_sgds_is_cycled() -> None:
    fixed = OneCycle(adam(), 0.1, 0.5, cycle_first_step_size=2, cycle_momentum=False)
    assert {momentum for _, momentum in run(fixed, 5)} == {0.9}
    assert fixed.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
    with pytest.warns(ZeroShardWarning, match="DeepSpeed leaves it alone"):
        scheduler = OneCycle(sgd, 0.1, 0.5, cycle_first_step_size=2)
    assert [momentum for _, momentum in run(scheduler, 4)] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9])


def test_an_optimizer_without_momentum_is_told_that_there_is_none_to_cycle() -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.warns(ZeroShardWarning, match="neither betas nor a momentum above 0"):
        scheduler = OneCycle(sgd, 0.1, 0.5, cycle_first_step_size=2)
    run(scheduler, 3)
    assert sgd.param_groups[0]["momentum"] == 0


def test_a_momentum_that_grows_to_1_is_announced_and_ends_in_an_error() -> None:
    with pytest.warns(ZeroShardWarning, match="grow to 1 after about 3 batches"):
        scheduler = OneCycle(adam(), 0.0, 1.0, cycle_first_step_size=1, decay_step_size=1, decay_mom_rate=0.1)
    run(scheduler, 3)
    with pytest.raises(UsageError, match=r"decay_mom_rate 0\.1 has moved the momentum to 1\.08 after 4 batches"):
        run(scheduler, 1)


def test_the_range_test_rises_in_a_line_without_end() -> None:
    scheduler = LRRangeTest(adam(), 0.1, 2, 0.5)
    rates = [rate for rate, _ in run(scheduler, 6)]
    assert rates == pytest.approx([0.1, 0.125, 0.15, 0.175, 0.2, 0.225, 0.25])


def test_a_staircase_rises_once_per_step_size() -> None:
    scheduler = LRRangeTest(adam(), 0.1, 2, 0.5, True)
    assert [rate for rate, _ in run(scheduler, 6)] == pytest.approx([0.1, 0.1, 0.15, 0.15, 0.2, 0.2, 0.25])


def test_the_range_test_has_deepspeeds_defaults_and_a_minimum_for_each_group() -> None:
    assert [rate for rate, _ in run(LRRangeTest(adam()), 2)] == pytest.approx([0.001, 0.0010005, 0.001001])
    optimizer = adam(2)
    run(LRRangeTest(optimizer, [0.1, 0.2], 1), 1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.4]


def make(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    if kind == "range":
        return LRRangeTest(optimizer, 0.1, 3, 0.5)
    return OneCycle(optimizer, 0.1, 0.5, 0.1, cycle_first_step_size=3, decay_step_size=2, decay_mom_rate=-0.05)


@pytest.mark.parametrize("kind", ["range", "cycle"])
@pytest.mark.parametrize("cut", [0, 2, 6, 8])
def test_a_restored_schedule_goes_on_where_it_stopped(kind: str, cut: int) -> None:
    expected = run(make(kind, adam()), 11)
    first = make(kind, adam())
    run(first, cut)
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"last_batch_iteration": cut - 1}
    second = make(kind, adam())
    second.load_state_dict(state)
    assert run(second, 11 - cut) == expected[cut:]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("OneCycle", {"cycle_first_step_size": 0}, "cycle_first_step_size must be an integer of 1 or more, got 0"),
        ("OneCycle", {"cycle_first_step_size": 1.5}, "cycle_first_step_size must be an integer"),
        ("OneCycle", {"cycle_second_step_size": -1}, "cycle_second_step_size must be an integer of 0 or more"),
        ("OneCycle", {"cycle_max_mom": 1.0}, r"cycle_max_mom 1\.0 must be at least 0 and below 1"),
        ("OneCycle", {"cycle_min_lr": [0.1, 0.2]}, "cycle_min_lr has 2 values but the optimizer has 1 groups"),
        ("OneCycle", {"cycle_max_mom": [0.9, 0.8]}, "cycle_max_mom has 2 values but the optimizer has 1 groups"),
        ("OneCycle", {"cycle_min_mom": [1.5]}, r"cycle_min_mom 1\.5 must be at least 0 and below 1"),
        ("OneCycle", {"cycle_max_lr": None}, "cycle_max_lr must be a number or a list of numbers, got None"),
        ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2]}, "lr_range_test_min_lr has 2 values but the optimizer"),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, "warmup_max_lr has 2 values but the optimizer has 1 groups"),
        ("WarmupLR", {"warmup_min_lr": ["a"]}, "warmup_min_lr must be a number or a list of numbers"),
        ("OneCycle", {"decay_lr_rate": -0.1}, "decay_lr_rate must be a number of 0 or more"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size must be an integer of 1 or more"),
        ("LRRangeTest", {"step_size": 3}, "has no such argument; did you mean lr_range_test_step_size"),
    ],
)
def test_values_without_meaning_are_refused(name: str, params: dict[str, Any], message: str) -> None:
    needed = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5} if name == "OneCycle" else {}
    with pytest.raises(ConfigError, match=message):
        build_scheduler(adam(), name, {**needed, **params})


CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 2}
CONFIG = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "weight_decay": 0.1}},
    "scheduler": {"type": "OneCycle", "params": CYCLE},
}


def test_the_engine_trains_with_the_cycled_momentum() -> None:
    """Equal to plain torch whose groups are set by the hand-made table."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    twin = torch.nn.Linear(4, 4)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(twin.parameters(), weight_decay=0.1)
    engine, *_ = zeroshard.initialize(model=model, config={**CONFIG, "gradient_clipping": 0.0})
    for rate, momentum in [(0.01, 0.8), (0.03, 0.85), (0.05, 0.8), (0.03, 0.85), (0.01, 0.9), (0.01, 0.9)]:
        batch = torch.randn(2, 4)
        engine.backward(engine(batch).square().mean())
        engine.step()
        plain.param_groups[0].update(lr=rate, betas=(momentum, 0.99))
        plain.zero_grad()
        twin(batch).square().mean().backward()
        plain.step()
        torch.testing.assert_close(model.weight, twin.weight, rtol=1e-6, atol=1e-7)
    engine.destroy()


def test_the_table_of_the_gpu_step_takes_the_cycled_betas() -> None:
    """The device's update reads betas at each step, not once: its twin on the CPU follows the same table."""
    model = torch.nn.Linear(4, 4)
    engine, optimizer, *_ = zeroshard.initialize(model=model, config=CONFIG)
    assert optimizer is not None
    handle = stepper_of(model).handle
    from zeroshard.engine.step.regions_of import make_regions
    from zeroshard.optim.rules import ADAMW

    table = DeviceAdam(ADAMW, make_regions(handle, optimizer.param_groups), torch.device("cpu"))
    active = torch.ones(len(table._steps), dtype=torch.bool)
    for beta in (0.8, 0.85):
        table.prepare(torch.tensor(1.0, dtype=torch.float64), active, optimizer.param_groups)
        assert table._rows[0, 6:].tolist() == pytest.approx([1 - beta, 0.99, 0.01])
        engine.backward(engine(torch.randn(2, 4)).square().mean())
        engine.step()
    engine.destroy()


@pytest.mark.parametrize(("first", "second", "ratio"), [(100, 0, 1.0), (100, None, 0.5), (30, 10, 0.75)])
def test_a_cycle_tells_which_part_of_it_is_the_rise(first: int, second: int | None, ratio: float) -> None:
    optimizer = torch.optim.Adam([torch.zeros(1)])
    cycle = OneCycle(optimizer, 0.001, 0.1, cycle_first_step_size=first, cycle_second_step_size=second)
    assert cycle.step_ratio == ratio

"""The device-side loss scale follows the rules of the dynamic scaler, step for step, and never asks the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.optim.loss_scale import CEILING, LossScaler


@dataclass
class Reference:
    """The rules in plain Python, counted in iterations as the original is."""

    scale: float
    window: int
    hysteresis: int
    consecutive: bool
    minimum: float
    iteration: int = 0
    last_overflow: int = -1
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def update(self, bad: bool) -> None:
        if bad:
            if self.left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive:
                self.left = self.hysteresis
            stable = self.iteration - self.last_overflow - 1
            if stable > 0 and stable % self.window == 0:
                self.left = self.hysteresis
                self.scale = min(self.scale * 2, CEILING)
        self.iteration += 1


def feed(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step of a string of '.' (good) and 'x' (overflow)."""
    scales = []
    for step in steps:
        scaler.update(torch.tensor(step == "x"))
        scales.append(float(scaler.scale))
    return scales


@settings(deadline=None, max_examples=150)
@given(
    steps=st.lists(st.booleans(), max_size=60),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    initial=st.sampled_from([1.0, 3.0, 8.0, 65536.0, 2.0**125]),
    minimum=st.sampled_from([0.25, 1.0, 5.0]),
)
def test_every_sequence_of_overflows_gives_the_scale_of_the_reference(
    steps: list[bool], window: int, hysteresis: int, consecutive: bool, initial: float, minimum: float
) -> None:
    reference = Reference(initial, window, hysteresis, consecutive, minimum)
    scaler = LossScaler("cpu", True, initial, window, hysteresis, consecutive, minimum)
    for bad in steps:
        reference.update(bad)
        scaler.update(torch.tensor(bad))
        assert float(scaler.scale) == reference.scale
        assert int(scaler.hysteresis_left) == reference.left


def test_the_scale_doubles_in_the_step_after_each_window_of_good_steps() -> None:
    assert feed(LossScaler("cpu", initial=8, window=3), ".......") == [8, 8, 8, 16, 16, 16, 32]


@pytest.mark.parametrize(
    ("steps", "options", "scales"),
    [
        ("..........", {"window": 2}, [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096]),
        (
            ".xx...x...x.",
            {"window": 3, "hysteresis": 1},
            [256, 128, 64, 64, 64, 64, 32, 32, 32, 32, 16, 16],
        ),
        (
            ".x.xx...x...x.",
            {"window": 3, "hysteresis": 2},
            [256, 256, 256, 128, 64, 64, 64, 64, 32, 32, 32, 32, 16, 16],
        ),
        (
            ".xx.x.xxxx.x....",
            {"window": 3, "hysteresis": 3, "consecutive_hysteresis": True},
            [256, 256, 256, 256, 256, 256, 256, 256, 128, 64, 64, 64, 64, 64, 64, 128],
        ),
    ],
)
def test_the_scale_is_that_of_deepspeed_step_for_step(steps: str, options: dict[str, Any], scales: list[float]) -> None:
    """`cur_scale` after each step of DeepSpeed 0.19.8 at stage 1, on two CPU ranks, with "initial_scale_power": 8.

    The model was of three linear layers; the loss of the steps that are marked x was multiplied by inf.
    """
    assert feed(LossScaler("cpu", initial=256, **options), steps) == scales


def test_a_state_with_more_good_steps_than_a_window_goes_on_to_grow() -> None:
    """An import from DeepSpeed counts the good steps since the last overflow, however often the scale grew since."""
    scaler = LossScaler("cpu", initial=8, window=3)
    scaler.load_state_dict({**scaler.state_dict(), "good_steps": 8})
    assert feed(scaler, "...") == [8, 16, 16]


def test_hysteresis_tolerates_all_but_the_last_overflow_and_then_none_until_a_growth() -> None:
    scaler = LossScaler("cpu", initial=64, window=3, hysteresis=2)
    assert feed(scaler, "x.x.x") == [64, 64, 32, 32, 16]
    assert feed(scaler, "....x") == [16, 16, 16, 32, 32]


def test_consecutive_hysteresis_is_renewed_by_any_good_step() -> None:
    scaler = LossScaler("cpu", initial=64, window=100, hysteresis=2, consecutive_hysteresis=True)
    assert feed(scaler, "x.x.xx") == [64, 64, 64, 64, 64, 32]


def test_overflow_at_the_minimum_keeps_the_scale_and_counts_the_skips() -> None:
    scaler = LossScaler("cpu", initial=2, hysteresis=1, minimum=1)
    assert feed(scaler, "xxxx") == [1, 1, 1, 1]
    assert int(scaler.consecutive_skips) == 4
    assert feed(scaler, ".x") == [1, 1]
    assert int(scaler.consecutive_skips) == 1
    assert int(scaler.total_skips) == 5


def test_a_static_scale_never_moves_but_still_counts() -> None:
    scaler = LossScaler("cpu", dynamic=False, initial=128, window=1, hysteresis=1)
    assert feed(scaler, "..xx.x") == [128] * 6
    assert int(scaler.total_skips) == 3
    assert int(scaler.consecutive_skips) == 1


def test_a_scale_that_grows_for_ever_stays_finite() -> None:
    assert feed(LossScaler("cpu", initial=2.0**125, window=1), "....") == [CEILING / 2, CEILING, CEILING, CEILING]


@pytest.mark.parametrize("flag", [torch.tensor([1.0]), torch.tensor(3, dtype=torch.int32), torch.tensor(float("nan"))])
def test_any_nonzero_flag_is_an_overflow(flag: torch.Tensor) -> None:
    scaler = LossScaler("cpu", initial=8, hysteresis=1)
    scaler.update(flag)
    assert float(scaler.scale) == 4


class NoHostReads(TorchDispatchMode):
    """Fails on the one operation by which the host reads a device scalar."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host read a device scalar"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("consecutive", [False, True])
def test_an_update_reads_nothing_back_to_the_host(consecutive: bool) -> None:
    scaler = LossScaler("cpu", consecutive_hysteresis=consecutive)
    flag = torch.tensor(True)
    with NoHostReads():
        scaler.update(flag)
        with pytest.raises(AssertionError, match="host read"):
            float(scaler.scale)


def test_an_update_runs_on_a_device_without_values() -> None:
    """The meta device has no values to read, so any decision taken on the host would fail there."""
    LossScaler("meta").update(torch.empty((), dtype=torch.bool, device="meta"))


def test_the_state_tensors_keep_their_identity() -> None:
    scaler = LossScaler("cpu", window=1, hysteresis=1)
    scale, address = scaler.scale, scaler.scale.data_ptr()
    feed(scaler, ".x.")
    assert scaler.scale is scale
    assert scale.data_ptr() == address


@pytest.mark.parametrize("cut", range(9))
def test_a_restored_scaler_goes_on_as_if_it_had_never_stopped(cut: int) -> None:
    steps = "..x.x...x"
    whole = LossScaler("cpu", initial=64, window=2, hysteresis=3)
    expected = feed(whole, steps)
    first = LossScaler("cpu", initial=64, window=2, hysteresis=3)
    feed(first, steps[:cut])
    state = first.state_dict()
    assert all(type(value) in (int, float) for value in state.values())
    second = LossScaler("cpu", initial=1, window=2, hysteresis=3)
    second.load_state_dict(state)
    assert feed(second, steps[cut:]) == expected[cut:]
    assert second.state_dict() == whole.state_dict()


def test_an_incomplete_state_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="good_steps"):
        LossScaler("cpu").load_state_dict(
            {"scale": 1.0, "hysteresis_left": 1, "consecutive_skips": 0, "total_skips": 0}
        )


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"window": 0}, "loss_scale_window"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"initial": 0.0}, "loss_scale"),
        ({"minimum": -1.0}, "min_loss_scale"),
        ({"initial": float("inf")}, "loss_scale"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_key(values: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LossScaler("cpu", **values)  # pyright: ignore[reportArgumentType]


def test_a_hysteresis_beyond_any_run_never_halves_the_scale() -> None:
    scaler = LossScaler("cpu", initial=8.0, hysteresis=2**63 - 1)
    for _ in range(3):
        scaler.update(torch.ones(()))
    assert float(scaler.scale) == 8.0
    again = LossScaler("cpu", hysteresis=2**63 - 1)
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("value", [2**31, -1, float("nan"), "many", None])
def test_a_state_that_can_not_be_is_refused_and_nothing_changes(value: Any) -> None:
    scaler = LossScaler("cpu")
    before = scaler.state_dict()
    with pytest.raises(CheckpointError, match="total_skips"):
        scaler.load_state_dict({**before, "good_steps": 5, "total_skips": value})
    assert scaler.state_dict() == before

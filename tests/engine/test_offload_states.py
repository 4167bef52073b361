"""offload_states gives the device's memory away until reload_states, and training goes on as if nothing had been."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, Task, square_loss
from tests.support.offload import offloaded, recipe
from tests.support.training import Setting, assert_same, full_parameters, shard_task
from tests.support.zoo import Stack
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.step.attached import stepper_of
from zeroshard.errors import UsageError
from zeroshard.tiers import values_of

TASK = Task(Stack, square_loss)
KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads")


def _train(setting: Setting, rank: int, away: tuple[str, ...] | None, between: bool) -> dict[str, torch.Tensor]:
    """Three steps; before each, or between its micro-batches, the state goes away and comes back."""
    model, optimizer = shard_task(TASK, setting)
    groups = [group for unit in handle_of(model).runtime.units for group in unit.groups]
    sizes = [size for group in groups for size in (group.whole.nbytes, group.shard.nbytes)]
    for step in range(3):
        for micro in range(setting.micro):
            if away is not None and (micro > 0) == between:
                moved = zeroshard.offload_states(model, away)
                taken = [torch.empty(size, dtype=torch.uint8) for size in sizes]  # so that it comes back elsewhere
                assert zeroshard.reload_states(model) == moved
                del taken
            (TASK.loss(model, Batch(step, micro, rank)) / setting.micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = full_parameters(model)
    zeroshard.close(model)
    return found


def _same(rank: int, world: int) -> None:
    for stage in (1, 3):
        plain = recipe(stage, "bf16")
        setting = Setting(plan=plain, micro=2)
        expected = _train(setting, rank, None, between=False)
        for away in (KINDS, ("lp_grads",), ("optim_states", "hp_params")):
            assert_same(_train(setting, rank, away, between=away == ("lp_grads",)), expected, f"stage {stage}, {away}")
        host = Setting(plan=offloaded(plain), micro=2)
        assert_same(_train(host, rank, KINDS, between=False), _train(host, rank, None, between=False), "on the host")


def test_training_goes_on_with_the_same_bits() -> None:
    run_ranks(2, _same)


def _elsewhere(rank: int, world: int) -> None:
    for stage, dtype in ((0, None), (1, None), (2, "bf16")):
        setting = Setting(plan=recipe(stage, dtype), micro=2)
        expected = _train(setting, rank, None, between=False)
        model, optimizer = shard_task(TASK, setting)
        taken: list[torch.Tensor] = []
        for step in range(3):
            for micro in range(setting.micro):
                zeroshard.offload_states(model, KINDS)
                # What lies at the old addresses when the state comes back.
                taken += [torch.empty(size, dtype=torch.uint8) for size in range(64, 6400, 64) for _ in range(2)]
                zeroshard.reload_states(model)
                (TASK.loss(model, Batch(step, micro, rank)) / setting.micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_parameters(model), expected, f"stage {stage}")
        zeroshard.close(model)


def test_state_may_come_back_at_other_addresses() -> None:
    run_ranks(2, _elsewhere)


def _bytes_of(model: torch.nn.Module) -> int:
    """What the state of a kind that can go takes just now, by storages."""
    handle = handle_of(model)
    tensors = [*stepper_of(model).update.tensors().values()]
    for unit in handle.runtime.units:
        for group in unit.groups:
            master = None if group.master is None else values_of(group.master)
            tensors += [one for one in (master, group.grad, group.shard, group.whole) if one is not None]
    slots = {slot.untyped_storage().data_ptr() for slot in handle.runtime.storage.gather_slots}
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(s.nbytes() for s in storages.values() if s.data_ptr() not in slots)


def _refused(rank: int, world: int) -> None:
    for stage in (1, 3):
        _refuse(stage, rank)


def _refuse(stage: int, rank: int) -> None:
    model, optimizer = shard_task(TASK, Setting(plan=recipe(stage, "bf16"), micro=2))
    TASK.loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    zeroshard.drain(model)
    before = _bytes_of(model)
    moved = zeroshard.offload_states(model)
    assert _bytes_of(model) == before - moved == 0, "nothing of it is left on the device"
    for use in (
        lambda: TASK.loss(model, Batch(1, 0, rank)),
        optimizer.step,
        lambda: dict(zeroshard.iterate_full_parameters(model)),
        lambda: zeroshard.offload_states(model),
        lambda: zeroshard.save(model, "nowhere", "tag"),
    ):
        with pytest.raises(UsageError, match="reload_states"):
            use()
    zeroshard.reload_states(model)
    TASK.loss(model, Batch(1, 0, rank)).backward()
    optimizer.zero_grad()
    expected = full_parameters(model)
    zeroshard.offload_states(model)
    zeroshard.close(model)  # brings back what the parameters of a closed model need
    with zeroshard.GatheredParameters(model):
        found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert_same(found, {name: value.to(found[name].dtype) for name, value in expected.items()}, "closed")


def test_who_needs_what_is_away_is_told_to_reload() -> None:
    run_ranks(2, _refused)


def test_unknown_names_and_devices_are_refused() -> None:
    model = Stack()
    model, _ = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=replace(recipe(1)))
    with pytest.raises(UsageError, match="optim_states, hp_params"):
        zeroshard.offload_states(model, ["moments"])
    with pytest.raises(UsageError, match="'cpu' only"):
        zeroshard.offload_states(model, device="nvme")
    assert zeroshard.reload_states(model) == 0
    zeroshard.close(model)

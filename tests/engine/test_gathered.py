"""Whole parameters outside of a forward: read, changed by one rank, streamed, and as a state dict."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import TIED_TRANSFORMER, WIDTH, Batch, Task, square_loss
from tests.support.training import (
    Setting,
    adamw,
    assert_close,
    assert_same,
    build,
    full_parameters,
    shard_task,
    train_reference,
)
from tests.support.zoo import STRUCTURES, Stack
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import UsageError
from zeroshard.sharding.sharded_init import ShardedInit

STAGES = (0, 1, 2, 3)
TASK = Task(Stack, square_loss)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 1) -> None:
    for step in range(steps):
        square_loss(model, Batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _read(rank: int, world: int) -> None:
    reference = train_reference(TASK, Setting(steps=2), world).parameters
    for stage in STAGES:
        model, optimizer = shard_task(TASK, Setting(plan=stage))
        _train(model, optimizer, rank, steps=2)
        named = dict(model.named_parameters())
        sharded = [name for name, parameter in named.items() if parameter.numel() == 0]
        assert bool(sharded) == (stage == 3)
        for which in (model, list(named.values()), (p for p in named.values()), model.parameters()):
            with zeroshard.GatheredParameters(which):
                assert_same({name: p.detach() for name, p in named.items()}, reference, f"stage {stage}")
            assert [name for name, parameter in named.items() if parameter.numel() == 0] == sharded
        with zeroshard.GatheredParameters(named["outer.weight"]):
            assert torch.equal(named["outer.weight"], reference["outer.weight"])
        with zeroshard.GatheredParameters(None), zeroshard.GatheredParameters([], modifier_rank=0):
            pass
        with zeroshard.GatheredParameters([torch.ones(3), nn.Parameter(torch.ones(2)), *named.values()]):
            assert all(parameter.numel() for parameter in named.values())
        with zeroshard.GatheredParameters(model, enabled=False):
            assert [name for name, parameter in named.items() if parameter.numel() == 0] == sharded
        _train(model, optimizer, rank)  # and training goes on


def test_reads_a_list_a_generator_a_module_a_parameter_and_nothing() -> None:
    run_ranks(2, _read)


def _nested(rank: int, world: int) -> None:
    model, _ = shard_task(TASK, Setting())
    assert isinstance(model, Stack)
    outer, inner = model.outer.weight, model.inner.weight
    with zeroshard.GatheredParameters(outer):
        kept = outer.data_ptr()
        with zeroshard.GatheredParameters([outer, inner], modifier_rank=1):
            assert outer.data_ptr() == kept, "gathered already, so left where it is"
            with torch.no_grad():
                inner.fill_(rank)
        assert outer.numel() == WIDTH * WIDTH, "still inside of the outer block"
        assert inner.numel() == 0
    assert outer.numel() == 0
    assert bool((full_parameters(model)["inner.weight"] == 1).all())


def _forward_inside(rank: int, world: int) -> None:
    """What a block holds is used as it is and not gathered; of a unit that it holds in part the rest is."""
    expected, theirs = shard_task(TASK, Setting())
    model, optimizer = shard_task(TASK, Setting())
    assert isinstance(model, Stack)
    _train(expected, theirs, rank)
    log, batch = handle_of(model).comm.log, Batch(0, 0, rank)
    with zeroshard.GatheredParameters(model):
        before = log.count
        loss = square_loss(model, batch)
        assert log.count == before
        if rank == 0:
            with torch.no_grad():
                assert torch.equal(square_loss(model, batch), loss)  # by one rank alone
        assert all(parameter.numel() for parameter in model.parameters())
    assert not any(parameter.numel() for parameter in model.parameters())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert_same(full_parameters(model), full_parameters(expected), "forward inside, backward outside")
    for held in (list(model.parameters()), [model.inner.weight], [model.outer.weight]):
        with zeroshard.GatheredParameters(held, modifier_rank=0), torch.no_grad():
            for parameter in held:
                parameter.mul_(2)
            inside = square_loss(model, batch)
            assert all(parameter.numel() for parameter in held)
        with torch.no_grad():
            assert torch.equal(square_loss(model, batch), inside)
        with zeroshard.GatheredParameters(held):
            loss = square_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _nests_and_runs(rank: int, world: int) -> None:
    _nested(rank, world)
    _forward_inside(rank, world)


def test_nests_and_a_forward_inside_uses_what_is_held() -> None:
    run_ranks(2, _nests_and_runs)


def _modify(rank: int, world: int) -> None:
    for stage in STAGES:
        model, optimizer = shard_task(TASK, Setting(plan=stage))
        assert isinstance(model, Stack)
        plain = build(TASK)
        assert isinstance(plain, Stack)
        for changed in (model, plain):
            expected_rank = rank if changed is model else world - 1
            with zeroshard.GatheredParameters(changed, modifier_rank=world - 1), torch.no_grad():
                changed.blocks[1].get_submodule("up").weight.add_(0.25 * expected_rank)  # type: ignore[operator]
                changed.outer.bias.copy_(torch.full((WIDTH,), float(expected_rank)))
        assert_same(full_parameters(model), dict(plain.named_parameters()), f"stage {stage}: the last rank's values")
        plain_optimizer = adamw(plain)
        for step in range(2):
            square_loss(model, Batch(step, 0, rank)).backward()
            optimizer.step()
            for member in range(world):
                (square_loss(plain, Batch(step, 0, member)) / world).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        assert_close(full_parameters(model), dict(plain.named_parameters()), what=f"stage {stage}: trained on")


def test_changes_of_the_modifier_rank_reach_all_ranks_and_the_training() -> None:
    run_ranks(3, _modify)


def _modify_whole(rank: int, world: int) -> None:
    for stage in (1, 2):
        model, optimizer = shard_task(TASK, Setting(plan=stage))
        _train(model, optimizer, rank)
        sent, weight = handle_of(model).comm.sent, dict(model.named_parameters())["outer.weight"]
        with zeroshard.GatheredParameters(model, modifier_rank=0), torch.no_grad():
            weight.fill_(1.0 + rank)
        zeroshard.safe_set_full_fp32_param(dict(model.named_parameters())["outer.bias"], torch.zeros(WIDTH))
        with torch.no_grad():
            weight.mul_(3.0)
        sent.reset_totals()
        square_loss(model, Batch(0, 0, rank))
        assert not sent.totals(), f"stage {stage}: all ranks had written the whole, and yet gather it"
        assert bool((weight == 3.0).all()), f"stage {stage}"


def test_what_rests_whole_is_not_gathered_after_all_ranks_have_written_it() -> None:
    """A gather would undo what is changed in place before it has landed."""
    run_ranks(2, _modify_whole)


def _give_data(rank: int, world: int) -> None:
    """What assigns data, as torch.nn.utils.vector_to_parameters does, changes values; a shape is not changed so."""
    for stage in STAGES:
        model, optimizer = shard_task(TASK, Setting(plan=stage))
        names = dict(model.named_parameters())
        _train(model, optimizer, rank)
        before = full_parameters(model)
        with zeroshard.GatheredParameters(model, modifier_rank=0):
            values = nn.utils.parameters_to_vector(model.parameters()) * (2.0 + rank)
            nn.utils.vector_to_parameters(values, model.parameters())
        assert_same(full_parameters(model), {name: value * 2.0 for name, value in before.items()}, f"stage {stage}")
        _train(model, optimizer, rank)  # the step updates what was given
        after = full_parameters(model)
        with pytest.raises(UsageError, match=r"'outer\.bias' was given data of another shape"):
            _give(names["outer.bias"], torch.zeros(WIDTH + 1))
        with pytest.raises(UsageError, match=r"'outer\.bias' was changed inside GatheredParameters"):
            _give(names["outer.bias"], torch.zeros(WIDTH), modifier=None)
        assert_same(full_parameters(model), after, f"stage {stage}: and nothing was kept")
        _train(model, optimizer, rank)
    with ShardedInit():
        loose = Stack()
    _give(loose.outer.bias, torch.ones(WIDTH))
    with pytest.raises(UsageError, match="was given data of another shape"):
        _give(loose.outer.bias, torch.zeros(WIDTH + 1))
    with zeroshard.GatheredParameters(loose.outer.bias):
        assert torch.equal(loose.outer.bias, torch.ones(WIDTH))


def _give(parameter: torch.Tensor, value: torch.Tensor, modifier: int | None = 0) -> None:
    with zeroshard.GatheredParameters(parameter, modifier_rank=modifier):
        parameter.data = value


def test_data_that_is_assigned_inside_is_a_change_of_the_values() -> None:
    run_ranks(2, _give_data)


def _give_own_memory(rank: int, world: int) -> None:
    for stage in STAGES:
        torch.manual_seed(5)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        mine = copy.deepcopy(plain)
        model, optimizer = zeroshard.shard(mine, torch.optim.SGD(mine.parameters(), lr=0.1), plan=stage)
        with zeroshard.GatheredParameters(model, modifier_rank=0):
            loss = _rearrange(model)
        (loss + model(torch.ones(2, 4)).square().sum()).backward()
        optimizer.step()
        truth = torch.optim.SGD(plain.parameters(), lr=0.1)
        (_rearrange(plain) + plain(torch.ones(2, 4)).square().sum()).backward()
        truth.step()
        expected = {name: value.detach() for name, value in plain.named_parameters()}
        assert_close(full_parameters(model), expected, what=f"stage {stage}")


def _rearrange(model: nn.Sequential) -> torch.Tensor:
    """Swaps two weights by their data, transposes one, and makes a loss of what they are then."""
    first, last = model[0].weight, model[2].weight
    first.data, last.data = last.data, first.data
    last.data = last.data.t()
    model[0].bias.data = model[0].bias.data.flip(0)
    return (first.abs() * last).sum() + model[0].bias.square().sum()


def test_data_assigned_inside_may_be_the_memory_of_another_parameter_or_a_view_of_its_own() -> None:
    run_ranks(2, _give_own_memory)


def _enter_again(rank: int, world: int) -> None:
    for stage in STAGES:
        model, optimizer = shard_task(TASK, Setting(plan=stage))
        parameter = dict(model.named_parameters())["outer.bias"]
        block = zeroshard.GatheredParameters(parameter, modifier_rank=0)
        for value in (2.0, 3.0):
            with block, torch.no_grad():
                with block:
                    assert torch.isfinite(parameter).all()
                parameter.fill_(value)
            assert bool((full_parameters(model)["outer.bias"] == value).all()), f"stage {stage}"
        _train(model, optimizer, rank)


def test_a_block_may_be_entered_again_and_inside_of_itself() -> None:
    run_ranks(2, _enter_again)


def _swap(rank: int, world: int) -> None:
    for stage in STAGES:
        model, _ = shard_task(TASK, Setting(plan=stage))
        parameter = dict(model.named_parameters())["outer.bias"]
        with (
            pytest.raises(UsageError, match=r"'outer\.bias' was swapped for another tensor"),
            zeroshard.GatheredParameters(parameter, modifier_rank=0),
        ):
            torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(WIDTH)))


def test_a_parameter_that_is_swapped_inside_is_named() -> None:
    run_ranks(2, _swap)


def _modify_bf16(rank: int, world: int) -> None:
    """A master keeps its precision where nothing was changed."""
    task = Task(lambda: Stack().bfloat16(), lambda m, b: m(b.normal(3, WIDTH).bfloat16()).float().square().mean())
    for stage in STAGES:
        model, optimizer = shard_task(task, Setting(plan=stage))
        task.loss(model, Batch(0, 0, rank)).backward()
        optimizer.step()
        before = full_parameters(model)
        parameter = dict(model.named_parameters())["outer.weight"]
        with zeroshard.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            assert parameter.dtype is torch.bfloat16
            parameter[0] = 3.0
        after = full_parameters(model)
        assert bool((after["outer.weight"][0] == 3.0).all())
        after["outer.weight"][0] = before["outer.weight"][0]
        assert_same(after, before, f"stage {stage}")


def test_a_change_in_bf16_keeps_the_untouched_master() -> None:
    run_ranks(2, _modify_bf16)


def _fail_inside(model: Stack) -> None:
    with zeroshard.GatheredParameters(model, modifier_rank=0), torch.no_grad():
        model.inner.weight.zero_()
        raise ZeroDivisionError


def _refused(rank: int, world: int) -> None:
    for stage in (2, 3):
        model, optimizer = shard_task(TASK, Setting(plan=stage))
        assert isinstance(model, Stack)
        with pytest.raises(UsageError, match=r"'outer\.weight' was changed.*modifier_rank"):
            with zeroshard.GatheredParameters(model), torch.no_grad():
                model.outer.weight.add_(1.0)
        with pytest.raises(UsageError, match="modifier_rank 2 is not one of the 2 ranks"):
            with zeroshard.GatheredParameters(model, modifier_rank=2):
                pass
        with pytest.raises(ZeroDivisionError):
            _fail_inside(model)
        if stage == 3:
            assert all(parameter.numel() == 0 for parameter in model.parameters())
            assert_same(full_parameters(model), dict(build(TASK).named_parameters()), "nothing was kept")
        _train(model, optimizer, rank)


def test_unkept_changes_are_refused_and_an_exception_leaves_the_parameters_sharded() -> None:
    run_ranks(2, _refused)


class _Buffered(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def _buffers(rank: int, world: int) -> None:
    model = _Buffered()
    model, _ = zeroshard.shard(model, plan=3)
    assert isinstance(model, _Buffered)
    with zeroshard.GatheredParameters([*model.parameters(), *model.buffers()], modifier_rank=0):
        model.steps += 1
    assert int(model.steps) == 4


def test_buffers_are_left_alone() -> None:
    run_ranks(2, _buffers)


def _state_dicts(rank: int, world: int) -> None:
    for name in ("embedding tied to head", "float32 norms in a bf16 model", "no element, one element, no dim"):
        task = STRUCTURES[name]
        plain = build(task)
        for stage in STAGES:
            model, _ = shard_task(task, Setting(plan=stage))
            state = zeroshard.full_state_dict(model, master=False)
            if rank:
                assert state == {}
                continue
            assert_same(state, plain.state_dict(), name)
            assert {key: value.dtype for key, value in state.items()} == {
                key: value.dtype for key, value in plain.state_dict().items()
            }
            build(task).load_state_dict(state)
    buffered = _Buffered()
    state = zeroshard.full_state_dict(zeroshard.shard(buffered, plan=3)[0])
    assert set(state) == (set() if rank else set(_Buffered().state_dict()))
    with torch.no_grad():
        buffered.steps += 1
    assert rank or int(state["steps"]) == 3, "what was read stays as it was"


def test_full_state_dict_is_the_unsharded_one_on_rank_0() -> None:
    run_ranks(2, _state_dicts)


def test_tied_weights_are_streamed_once() -> None:
    names = run_ranks(2, _names)[0]
    assert len(names) == len(set(names))
    assert "embedding.weight" in names
    assert "head.weight" not in names


def _names(rank: int, world: int) -> list[str]:
    return [name for name, _ in zeroshard.iterate_full_parameters(shard_task(TIED_TRANSFORMER, Setting())[0])]


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda parameter: parameter.fill_(3.0),
    "through data": lambda parameter: parameter.data.fill_(3.0),
    "through a view of data": lambda parameter: parameter.data.view(-1)[:1].neg_(),
    "through numpy": lambda parameter: parameter.detach().numpy().fill(3.0),
    "other data": lambda parameter: setattr(parameter, "data", torch.full_like(parameter, 3.0)),
}


def _unkept(rank: int, world: int) -> None:
    """Changes without modifier_rank are told, and what was there is there again, wherever the parameter rests."""
    recipes: list[int | zeroshard.Recipe] = [*STAGES, zeroshard.Recipe(persistence_threshold=WIDTH * WIDTH)]
    for recipe in recipes:
        model, optimizer = shard_task(TASK, Setting(plan=recipe))
        before = full_parameters(model)
        weight = cast("nn.Parameter", model.get_parameter("outer.weight"))
        for name, change in CHANGES.items():
            with pytest.raises(UsageError, match=r"'outer\.weight' was changed inside GatheredParameters"):
                _change_inside(weight, change)
            assert_same(full_parameters(model), before, f"{name}, {recipe}")
            with zeroshard.GatheredParameters(weight):
                assert torch.equal(weight, before["outer.weight"]), f"{name}, {recipe}"
        _train(model, optimizer, rank)
    with ShardedInit():
        loose = Stack()
    for name, change in CHANGES.items():
        with pytest.raises(UsageError, match=r"parameter 'outer.weight' was changed inside GatheredParameters"):
            _change_inside(loose.outer.weight, change)
        assert loose.outer.weight.numel() == 0, name


def _change_inside(weight: nn.Parameter, change: Callable[[nn.Parameter], object]) -> None:
    with zeroshard.GatheredParameters(weight), torch.no_grad():
        change(weight)


def test_changes_that_nobody_keeps_are_told_and_undone() -> None:
    run_ranks(2, _unkept)


def _across_passes(rank: int, world: int) -> None:
    for plan in (Setting(steps=1), Setting(steps=1, units=("blocks.0", "blocks.1", "blocks.2", "blocks.3"))):
        reference = train_reference(TASK, plan, world).parameters
        for held, evaluates in (("", False), ("blocks.1", False), ("", True), ("inner", True)):
            model, optimizer = shard_task(TASK, plan)
            loss = square_loss(model, Batch(0, 0, rank))
            with zeroshard.GatheredParameters(model.get_submodule(held)):
                if evaluates:
                    with torch.no_grad():
                        square_loss(model, Batch(1, 0, rank))
                else:
                    loss.backward()
                assert all(parameter.numel() for parameter in model.get_submodule(held).parameters())
            if evaluates:
                loss.backward()
            optimizer.step()
            assert_same(full_parameters(model), reference, f"{held or 'all'} held, evaluated: {evaluates}")
            zeroshard.close(model)


def test_it_may_open_between_a_forward_and_its_backward_around_that_or_an_evaluation() -> None:
    run_ranks(2, _across_passes)


def _steps_inside(rank: int, world: int) -> None:
    model, optimizer = shard_task(TASK, Setting(steps=1))
    square_loss(model, Batch(0, 0, rank)).backward()
    with (
        zeroshard.GatheredParameters(model),
        pytest.raises(UsageError, match=r"'inner.weight' is whole in an open zeroshard.GatheredParameters block"),
    ):
        optimizer.step()
    optimizer.step()
    assert_same(full_parameters(model), train_reference(TASK, Setting(steps=1), world).parameters)


def test_a_step_inside_is_refused_by_what_holds_the_parameters() -> None:
    run_ranks(2, _steps_inside)


def _closes_inside(rank: int, world: int) -> None:
    model, optimizer = shard_task(TASK, Setting(steps=1))
    with torch.no_grad(), zeroshard.GatheredParameters(model, modifier_rank=0):
        with pytest.raises(UsageError, match=r"close: parameter 'inner.weight' is whole in an open"):
            zeroshard.close(model)
        for parameter in model.parameters():
            parameter.zero_()
    assert all(not value.any() for value in full_parameters(model).values()), "the block has kept its changes"
    square_loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    zeroshard.close(model)


def test_a_model_is_not_closed_inside() -> None:
    run_ranks(2, _closes_inside)

"""What code of a model writes on its parameters in a forward is kept where they rest whole, as torch keeps it, and
refused by name where they are gathered for the forward alone. Nothing of it is lost without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import WIDTH, Batch, Task, square_loss
from tests.support.training import Setting, assert_same, build, full_parameters, sgd, shard_task, train_sharded
from zeroshard.engine.core.changes import FIRST_NUMBERS
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import UsageError, ZeroShardWarning
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.builder import Precision
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES

Write = Callable[[nn.Parameter], object]


def _under_no_grad(write: Write) -> Write:
    def writes(weight: nn.Parameter) -> None:
        with torch.no_grad():
            write(weight)

    return writes


WRITES: dict[str, Write] = {
    "clamp": lambda weight: weight.data.clamp_(-0.05, 0.05),
    "scale": lambda weight: weight.data.mul_(0.5),
    "negate": lambda weight: weight.data.neg_(),
    "permute": lambda weight: weight.data.copy_(weight.data.flip(0)),
    "one row": lambda weight: weight.data.__setitem__(0, 0.25),
    "renormalize": lambda weight: weight.data.div_(weight.data.norm(dim=1, keepdim=True)),
    "foreach": lambda weight: torch._foreach_mul_([weight.data], 0.5),
    "data of a view": lambda weight: weight.view(-1).data[:3].zero_(),
    "numpy": lambda weight: weight.detach().numpy().fill(0.125),
    "detached": lambda weight: weight.detach().mul_(0.5),
    "no_grad clamp": _under_no_grad(lambda weight: weight.clamp_(-0.05, 0.05)),
    "no_grad copy": _under_no_grad(lambda weight: weight.copy_(weight / weight.norm())),
    "no_grad set": _under_no_grad(lambda weight: weight.__setitem__((slice(None), 0), 0.5)),
}
"""In-place writes of a module's forward, before it uses the weight."""


class _Writing(nn.Linear):
    """Writes on its own weight in its forward, if `when` says so."""

    def __init__(self, write: Write, when: Callable[[_Writing], bool] = lambda _: True) -> None:
        super().__init__(WIDTH, WIDTH)
        self.write, self.when, self.calls = write, when, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.when(self):
            self.write(self.weight)
        return torch.tanh(super().forward(x.to(self.weight.dtype)))


class _Chain(nn.Module):
    def __init__(self, *blocks: nn.Module, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(blocks), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.normal(3, WIDTH).requires_grad_()).square().mean()


def _writing(write: Write) -> Task:
    return Task(lambda: _Chain(*(_Writing(write) for _ in range(3))), _loss)


def _step(model: nn.Module, optimizer: ShardedOptimizer, batch: Batch) -> None:
    _loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def _refuses(rank: int, world: int) -> None:
    for name, write in WRITES.items():
        model, optimizer = shard_task(_writing(write), Setting(plan=3, optimizer=sgd))
        with pytest.raises(UsageError) as caught:
            _step(model, optimizer, Batch(0, 0, rank))
        assert "'blocks.0.weight' was changed in place" in str(caught.value), name
        assert "GatheredParameters" in str(caught.value), name


def test_a_write_on_a_gathered_weight_is_refused_by_name() -> None:
    run_ranks(2, _refuses)


def _at_call(number: int) -> Callable[[_Writing], bool]:
    return lambda module: module.calls == number


class _Reaches(nn.Linear):
    """Writes on the weight of the block before it, which has been released by then."""

    def __init__(self, other: nn.Linear, write: Write) -> None:
        super().__init__(WIDTH, WIDTH)
        self.others, self.write = [other], write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.others[0].weight)
        return torch.tanh(super().forward(x))


class _Parent(_Chain):
    """Writes on the weight of its first block before that runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.get_parameter("blocks.0.weight")
        WRITES["clamp"](cast("nn.Parameter", weight))
        return super().forward(x)


def _of_a_sibling() -> nn.Module:
    first = nn.Linear(WIDTH, WIDTH)
    return _Chain(first, _Reaches(first, WRITES["scale"]), nn.Linear(WIDTH, WIDTH))


def _in_blocks(when: Callable[[_Writing], bool], reentrant: bool | None = None) -> nn.Module:
    return _Chain(*(_Writing(WRITES["clamp"], when) for _ in range(3)), reentrant=reentrant)


def _trains(model: nn.Module, batch: Batch) -> None:
    _loss(model, batch).backward()


def _evaluates(model: nn.Module, batch: Batch) -> None:
    model.eval()
    with torch.no_grad():
        _loss(model, batch)


def _infers(model: nn.Module, batch: Batch) -> None:
    with torch.inference_mode():
        model(batch.normal(3, WIDTH))


def _compiles(model: nn.Module, batch: Batch) -> None:
    for block in cast("_Chain", model).blocks:
        if block._compiled_call_impl is None:
            block.compile(backend="aot_eager")
    _loss(model, batch).backward()


PLACES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Batch], None]]] = {
    "by a sibling": (_of_a_sibling, _trains),
    "by the parent": (lambda: _Parent(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), _trains),
    "in the third pass": (lambda: _in_blocks(_at_call(FIRST_NUMBERS)), _trains),
    "in a recomputation": (lambda: _in_blocks(_at_call(2), reentrant=False), _trains),
    "in a reentrant recomputation": (lambda: _in_blocks(_at_call(2), reentrant=True), _trains),
    "in evaluation": (lambda: _in_blocks(lambda block: not block.training), _evaluates),
    "in inference mode": (lambda: _in_blocks(lambda _: True), _infers),
    "in compiled code": (lambda: _in_blocks(lambda _: True), _compiles),
}


def _repeat(use: Callable[[nn.Module, Batch], None], model: nn.Module, rank: int) -> None:
    for step in range(FIRST_NUMBERS):
        use(model, Batch(step, 0, rank))


def _refuses_everywhere(rank: int, world: int) -> None:
    for name, (make, use) in PLACES.items():
        model, _ = shard_task(Task(make, _loss), Setting(plan=3, micro=FIRST_NUMBERS, optimizer=sgd))
        with pytest.raises(UsageError) as caught:
            _repeat(use, model, rank)
        assert ".weight' was changed in place" in str(caught.value), name


def test_it_is_refused_wherever_it_is_written() -> None:
    run_ranks(2, _refuses_everywhere)


def _looks(rank: int, world: int) -> None:
    model, optimizer = shard_task(_writing(lambda _: None), Setting(plan=3, optimizer=sgd))
    changes = handle_of(model).runtime.parameters.changes
    for step in range(FIRST_NUMBERS + 1):
        loss = _loss(model, Batch(step, 0, rank))
        assert changes.active is (step < FIRST_NUMBERS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not changes.expected


def test_later_passes_do_not_look() -> None:
    run_ranks(2, _looks)


def _late(rank: int, world: int) -> None:
    task = Task(lambda: _Chain(_Writing(WRITES["scale"], lambda module: module.calls > 50)), _loss)
    model, _ = shard_task(task, Setting(plan=3, optimizer=sgd))
    with torch.no_grad():
        for number in range(1, 100):
            _loss(model, Batch(number, 0, rank))
        with pytest.raises(UsageError, match=r"'blocks\.0\.weight' was changed in place"):
            _loss(model, Batch(100, 0, rank))
    model, optimizer = shard_task(task, Setting(plan=MIXED["bfloat16"], optimizer=sgd))
    for number in range(1, 100):
        _step(model, optimizer, Batch(number, 0, rank))
    _loss(model, Batch(100, 0, rank)).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    told = [str(warning.message) for warning in caught if warning.category is ZeroShardWarning]
    assert rank != 0 or told[0].startswith("step 100 found parameters that were written without")  # rank 0 has the part


def test_a_write_that_begins_late_is_found_in_the_hundredth_pass_or_step() -> None:
    run_ranks(2, _late)


def _asked(rank: int, world: int) -> None:
    """With enable_sanity_checks the first pass that writes is found."""
    model = _Chain(_Writing(WRITES["scale"], lambda module: module.calls > 20))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "enable_sanity_checks": True}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine, *_ = zeroshard.initialize(model=model, config=config)
    with torch.no_grad():
        for number in range(20):
            _loss(engine.module, Batch(number, 0, rank))
        with pytest.raises(UsageError, match=r"'blocks\.0\.weight' was changed in place"):
            _loss(engine.module, Batch(20, 0, rank))


def test_every_pass_looks_if_the_config_asks_for_it() -> None:
    run_ranks(2, _asked)


def _on_a_whole_one(rank: int, world: int) -> None:
    with zeroshard.Init():
        model = _Chain(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = zeroshard.Recipe(persistence_threshold=WIDTH)
    model, sharded = zeroshard.shard(model, optimizer, plan=recipe, units=["blocks.0", "blocks.1"])
    whole, weight = model.get_parameter("blocks.0.weight"), model.get_parameter("blocks.1.weight")
    with torch.no_grad():
        whole.fill_(0.5)
    assert whole._version > weight._version
    _step(model, sharded, Batch(0, 0, rank))  # what was written is known to be on that one, which keeps it


def test_parameters_of_a_deferred_model_have_version_counters_of_their_own() -> None:
    run_ranks(2, _on_a_whole_one)


def _plain(task: Task, setting: Setting) -> dict[str, torch.Tensor]:
    """What torch makes of it, on the batches of one rank."""
    model = build(task)
    optimizer = setting.optimizer(model)
    for step in range(setting.steps):
        task.loss(model, Batch(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def _on_equal_batches(task: Task) -> Task:
    return Task(task.build, lambda model, batch: task.loss(model, Batch(batch.step, batch.micro, 0)))


def _keeps(rank: int, world: int) -> None:
    for name, write in WRITES.items():
        task, setting = _on_equal_batches(_writing(write)), Setting(steps=3, optimizer=sgd)
        expected = _plain(task, setting)
        for stage in (0, 1, 2):
            assert_same(train_sharded(task, setting.at(stage), rank).parameters, expected, f"{name}, {stage}")


def test_a_write_on_a_whole_weight_is_kept_as_torch_keeps_it() -> None:
    run_ranks(2, _keeps)


def _small_ones(rank: int, world: int) -> None:
    recipe = zeroshard.Recipe(persistence_threshold=WIDTH * WIDTH)
    for name in ("clamp", "no_grad clamp", "numpy"):
        task, setting = _on_equal_batches(_writing(WRITES[name])), Setting(plan=recipe, steps=3, optimizer=sgd)
        assert_same(train_sharded(task, setting, rank).parameters, _plain(task, setting), name)


def test_a_write_on_a_small_parameter_that_rests_whole_is_kept_at_stage_3() -> None:
    run_ranks(2, _small_ones)


MIXED = {
    "bfloat16": zeroshard.Recipe(sharding=STAGES[1], precision=Precision(param="bfloat16")),
    "float16, everything whole": zeroshard.Recipe(sharding=STAGES[0], precision=Precision(param="float16")),
    "small parameters of stage 3": zeroshard.Recipe(
        persistence_threshold=WIDTH * WIDTH, precision=Precision(param="bfloat16")
    ),
    "optimizer state in host memory": zeroshard.Recipe(sharding=STAGES[2], offload=Offload()),
}
"""Recipes in which parameters have master weights beside them."""


def _clipped_between_steps(write: Write, plan: zeroshard.Recipe, rank: int) -> dict[str, torch.Tensor]:
    """As critics are trained: their weights are clipped behind each step."""
    task = _writing(lambda _: None)
    model, optimizer = shard_task(task, Setting(plan=plan, optimizer=sgd))
    for step in range(FIRST_NUMBERS + 2):
        _loss(model, Batch(step, 0, rank)).float().backward()
        optimizer.step()
        optimizer.zero_grad()
        zeroshard.drain(model)
        for parameter in model.parameters():
            write(cast("nn.Parameter", parameter))
    _loss(model, Batch(9, 0, rank)).float().backward()
    optimizer.step()
    return full_parameters(model)


def _with_masters(rank: int, world: int, name: str) -> None:
    for write in ("clamp", "scale"):
        noted = _under_no_grad(NOTED[write])
        for train in (_in_the_forward, _clipped_between_steps):
            expected, found = (train(each, MIXED[name], rank) for each in (noted, WRITES[write]))
            assert_same(found, expected, f"{write}, {train.__name__}")


def _in_the_forward(write: Write, plan: zeroshard.Recipe, rank: int) -> dict[str, torch.Tensor]:
    task = Task(_writing(write).build, lambda model, batch: _loss(model, batch).float())
    return train_sharded(task, Setting(plan=plan, steps=FIRST_NUMBERS + 2, optimizer=sgd), rank).parameters


NOTED: dict[str, Write] = {"clamp": lambda weight: weight.clamp_(-0.05, 0.05), "scale": lambda weight: weight.mul_(0.5)}
"""The same writes where the version counter sees them."""


@pytest.mark.parametrize("name", MIXED)
def test_master_weights_follow_writes_that_no_version_counter_sees(name: str) -> None:
    run_ranks(2, _with_masters, name)


KEEPS: dict[str, Callable[[nn.Linear], object]] = {
    "detached": lambda module: module.weight.detach(),
    "view": lambda module: module.weight.data.view(-1)[3:],
    "in a list": lambda module: [module.weight.detach().t()],
    "array": lambda module: {"now": module.weight.detach().numpy()},
}


class _Keeping(nn.Linear):
    """Keeps something of its weight in an attribute."""

    def __init__(self, keep: Callable[[nn.Linear], object]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.keep, self.kept = keep, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.keep(self)
        return torch.tanh(super().forward(x))


def _keeping(keep: Callable[[nn.Linear], object]) -> Task:
    return Task(lambda: _Chain(*(_Keeping(keep) for _ in range(3))), _loss)


def _warned(task: Task, stage: int, rank: int, *, trains: bool) -> list[str]:
    model, optimizer = shard_task(task, Setting(plan=stage, optimizer=sgd))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            if trains:
                _step(model, optimizer, Batch(step, 0, rank))
            else:
                with torch.no_grad():
                    _loss(model, Batch(step, 0, rank))
    zeroshard.close(model)
    return [str(each.message) for each in caught if "kept after that forward" in str(each.message)]


def _keeps_views(rank: int, world: int) -> None:
    for name, keep in KEEPS.items():
        for trains in (True, False):
            found = _warned(_keeping(keep), 3, rank, trains=trains)
            assert len(found) == 3, name
            assert all(f"blocks.{number}.kept" in told for number, told in enumerate(sorted(found))), name
        assert _warned(_keeping(keep), 2, rank, trains=True) == [], name
    assert _warned(_keeping(lambda module: module.weight.detach().clone()), 3, rank, trains=True) == []
    assert _warned(_keeping(lambda module: module.weight), 3, rank, trains=True) == []


def test_a_view_of_a_gathered_weight_that_a_module_keeps_is_warned_of_by_name() -> None:
    run_ranks(2, _keeps_views)


def _scripts_views(rank: int, world: int) -> None:
    lists: dict[str, Callable[[list[object], torch.Tensor], None]] = {
        "list": lambda kept, weight: kept.append(weight.detach()),
        "tuples": lambda kept, weight: kept.append((weight.detach().view(-1)[2:], "name")),
        "copies": lambda kept, weight: kept.append(weight.detach().clone()),
        "parameters": lambda kept, weight: kept.append(weight),
        "losses": lambda kept, weight: kept.append(weight.detach().sum()),
    }
    for name, keep in lists.items():
        for trains in (True, False):
            kept: list[object] = []

            def note(module: nn.Linear) -> None:
                keep(kept, module.weight)  # noqa: B023

            found = _warned(_keeping(note), 3, rank, trains=trains)
            assert len(found) == (name in ("list", "tuples")), (name, trains, found)
            assert all("a list or the like of the script has views" in told for told in found)


def test_views_of_gathered_weights_that_a_script_collects_are_warned_of_once() -> None:
    run_ranks(2, _scripts_views)


class _Plus(nn.Module):
    """A parametrization that adds a trained product of low rank."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.delta = up @ down

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


class _Parametrized(nn.Module):
    """Puts a parametrization on a frozen weight for the time of its forward, as peft's `target_parameters` do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self.base, "weight", _Plus(self.down, self.up))
        out = self.base(x)
        parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)
        return torch.tanh(out)


def _adapts(rank: int, world: int) -> None:
    task = Task(lambda: nn.Sequential(*(_Parametrized() for _ in range(3))), square_loss)
    plain = build(task)
    optimizer = sgd(plain)
    for step in range(3):
        torch.stack([square_loss(plain, Batch(step, 0, each)) for each in range(world)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in (2, 3):
        model, sharded = shard_task(task, Setting(plan=stage, optimizer=sgd))
        for step in range(3):
            square_loss(model, Batch(step, 0, rank)).backward()
            sharded.step()
            sharded.zero_grad()
        found = full_parameters(model)
        for name, value in plain.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-6)
        zeroshard.close(model)


def test_a_frozen_weight_may_be_parametrized_for_the_time_of_a_forward() -> None:
    run_ranks(2, _adapts)

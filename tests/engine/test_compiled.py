"""torch.compile of whole models: one graph where all units rest whole, and training as without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import TRANSFORMER, WIDTH, Batch, Block, Task, Transformer, language_loss, square_loss
from tests.support.patience import Patience
from tests.support.training import Setting, Values, adamw, assert_same, build, full_parameters, shard_task
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.core.virtual_streams import Pace, VirtualStreams
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.builder import Recipe
from zeroshard.plan.placement import STAGES
from zeroshard.plan.policy import ExecutionPolicy

Compile = Callable[[nn.Module], nn.Module]


class _Wrapped(nn.Module):
    """A model inside that holds all parameters, as an adapter's does: a forward may begin there, too."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Transformer(tied=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.base(tokens) * 1.5


class _Checkpointed(Transformer):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class _BreakingBlock(Block):
    """Breaks the graph in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        torch._dynamo.graph_break()
        return x + self.mlp(self.norm2(x))


class _Breaking(Transformer):
    """The first block runs in one piece, the second one breaks the graph, the third one runs after that."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = _BreakingBlock()


def _activations() -> nn.Module:
    model = Transformer()
    zeroshard.checkpoint_activations(model)
    return model


def _wrapper(model: nn.Module) -> nn.Module:
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert isinstance(compiled, nn.Module)
    return compiled


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def _with_breaks(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def _train(
    model: nn.Module, optimizer: ShardedOptimizer, setting: Setting, rank: int, compile_: Compile | None
) -> Values:
    """Train, and infer before each step; compiled from the second step on, when gathers are still running."""
    torch._dynamo.reset()
    counters.clear()
    called = model
    for step in range(4):
        if compile_ is not None and step == 1:
            called = compile_(model)
        for micro in range(setting.micro):
            (language_loss(called, Batch(step, micro, rank)) / setting.micro).backward()
        with torch.no_grad():  # not between the step and the next forward, which has to wait for the step's gathers
            language_loss(called, Batch(9, 0, rank))
        optimizer.step()
        optimizer.zero_grad()
    found = full_parameters(model)
    zeroshard.close(model)
    return found


def _one_graph(rank: int, world: int, stage: int, make: Callable[[], nn.Module], ways: tuple[Compile, ...]) -> None:
    task, setting = Task(make, language_loss), Setting(plan=stage)
    expected = _train(*shard_task(task, setting), setting, rank, None)
    for compile_ in ways:
        assert_same(_train(*shard_task(task, setting), setting, rank, compile_), expected, compile_.__name__)
        assert not counters["graph_break"], compile_.__name__
        assert counters["stats"]["unique_graphs"] == 2, "with gradients, and without"


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 1), (2, 2), (1, 3)])
def test_a_model_whose_units_rest_whole_is_one_graph_and_trains_the_same(world: int, stage: int) -> None:
    run_ranks(world, _one_graph, stage, Transformer, (_wrapper, _in_place))


@pytest.mark.parametrize("make", [_Wrapped, _Checkpointed, _activations])
def test_so_do_models_in_others_and_checkpointed_ones(make: Callable[[], nn.Module]) -> None:
    run_ranks(2, _one_graph, 2, make, (_in_place,))


def _accumulated(rank: int, world: int) -> None:
    for make, compile_ in ((Transformer, _in_place), (_Breaking, _with_breaks)):
        for stage in (1, 2):
            setting = Setting(plan=stage, micro=2, clip=0.5)
            expected = _train(*shard_task(Task(make, language_loss), setting), setting, rank, None)
            found = _train(*shard_task(Task(make, language_loss), setting), setting, rank, compile_)
            assert_same(found, expected, f"{make.__name__}, stage {stage}")
            assert not [why for why in counters["graph_break"] if "zeroshard" in why]


def test_accumulation_and_breaks_of_the_models_own_train_the_same() -> None:
    run_ranks(2, _accumulated)


def _orders(rank: int, world: int) -> int:
    checked = 0
    for stage in (1, 2):
        setting = Setting(plan=Recipe(sharding=STAGES[stage], policy=ExecutionPolicy(overlap_step=True)))
        expected = _train(*shard_task(TRANSFORMER, setting), setting, rank, None)
        for pace, seed in ((Pace.LAZY, 0), (Pace.EAGER, 0), (Pace.MIXED, rank)):
            streams = VirtualStreams(Patience(), pace=pace, seed=seed)
            model = build(TRANSFORMER)
            model, optimizer = zeroshard.shard(model, adamw(model), plan=setting.plan, streams=streams)
            assert optimizer is not None
            assert_same(_train(model, optimizer, setting, rank, _in_place), expected, f"stage {stage}, {pace}")
            checked += streams.checked
    return checked


def test_compiled_code_comes_after_all_gathers_in_every_order_that_the_events_allow() -> None:
    for checked in run_ranks(2, _orders):
        assert checked > 500


def _reduces(rank: int, world: int) -> None:
    """A graph is the whole forward, so its backward gives all gradients at once, and reduces follow it."""
    model, optimizer = shard_task(TRANSFORMER, Setting(plan=2))
    log = handle_of(model).comm.log
    issued: list[dict[str, tuple[int, int]]] = []
    for compiled in (False, True):
        if compiled:
            _in_place(model)
        for step in range(2):
            log.reset_totals()
            language_loss(model, Batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            zeroshard.drain(model)
        issued.append(dict(log.totals()))
    assert issued[0] == issued[1]


def test_compiled_models_send_the_same() -> None:
    run_ranks(2, _reduces)


def _two_models(rank: int, world: int) -> None:
    """Compiled code of one model would fit another one of its class, but for what the engine has to know."""
    setting = Setting(plan=2)
    expected = _train(*shard_task(TRANSFORMER, setting), setting, rank, None)
    first, _ = shard_task(TRANSFORMER, setting)
    language_loss(_in_place(first), Batch(0, 0, rank)).backward()
    model, optimizer = shard_task(TRANSFORMER, setting)
    for step in range(4):
        language_loss(_in_place(model), Batch(step, 0, rank)).backward()
        assert handle_of(model).runtime.forward.compiled
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_parameters(model), expected)


def test_code_that_was_compiled_for_one_model_does_not_run_another_one_unnoticed() -> None:
    run_ranks(2, _two_models)


@contextmanager
def _called_in_the_forward(module: nn.Module, function: Callable[[torch.Tensor], object]) -> Iterator[None]:
    def call(_: nn.Module, args: tuple[torch.Tensor]) -> None:
        function(*args)

    hook = module.register_forward_pre_hook(call)
    try:
        yield
    finally:
        hook.remove()


def _one_block(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    return model.get_submodule("blocks.0")(given).square().mean()


def _within_and_outside(rank: int, world: int) -> None:
    """A function that calls a block is compiled within a pass, and then called outside of any."""
    found: list[Values] = []
    for compiled in (False, True):
        model, optimizer = shard_task(TRANSFORMER, Setting(plan=2))
        torch._dynamo.reset()

        def run(given: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return _one_block(model, given)

        called = torch.compile(run, backend="aot_eager") if compiled else run
        with _called_in_the_forward(model.get_submodule("blocks.1"), called):
            language_loss(model, Batch(9, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for step in range(2):
            called(Batch(step, 0, rank).normal(1, 3, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(full_parameters(model))
        zeroshard.close(model)
    assert_same(found[1], found[0])


def test_code_that_was_compiled_within_a_pass_does_not_run_outside_of_one() -> None:
    run_ranks(2, _within_and_outside)


def _parts(rank: int, world: int) -> None:
    """A part of the model that reads parameters of the root is compiled on its own and called directly."""
    for stage in (2, 3):
        found: list[Values] = []
        for fullgraph in (None, False, True):
            model, optimizer = shard_task(TRANSFORMER, Setting(plan=stage))
            norm = model.get_submodule("norm")
            torch._dynamo.reset()
            if fullgraph is not None:
                norm.compile(backend="aot_eager", fullgraph=fullgraph)
            for step in range(2):
                square_loss(norm, Batch(step, 0, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(full_parameters(model))
            zeroshard.close(model)
            assert_same(found[-1], found[0], f"stage {stage}, fullgraph={fullgraph}")


def test_a_part_that_is_compiled_and_called_directly_begins_a_pass() -> None:
    run_ranks(2, _parts)


def _blocks(rank: int, world: int) -> None:
    """Blocks that are compiled, each in one graph, keep their hooks, and so their places in the lists."""
    for stage in (2, 3):
        setting = replace(Setting(), plan=stage)
        expected = _train(*shard_task(TRANSFORMER, setting), setting, rank, None)
        model, optimizer = shard_task(TRANSFORMER, setting)
        for block in model.get_submodule("blocks").children():
            block.compile(backend="aot_eager", fullgraph=True)
        forward = handle_of(model).runtime.forward
        assert_same(_train(model, optimizer, setting, rank, None), expected, f"stage {stage}")
        assert not forward.compiled


def test_compiled_blocks_keep_their_hooks() -> None:
    run_ranks(2, _blocks)


def _engine(rank: int, world: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    found: list[Values] = []
    for compile_ in (None, _wrapper, _in_place):
        torch._dynamo.reset()
        counters.clear()
        model = build(TRANSFORMER)
        engine, *_ = zeroshard.initialize(model=model, optimizer=adamw(model), config=config)
        called = engine if compile_ is None else compile_(engine)
        for micro in range(4):
            engine.backward(language_loss(called, Batch(micro // 2, micro % 2, rank)))
            engine.step()
        assert not counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == (compile_ is not None)
        found.append(full_parameters(engine.module))
        engine.destroy()
        assert_same(found[-1], found[0])


def test_an_engine_that_is_compiled_compiles_its_model_in_one_graph() -> None:
    run_ranks(2, _engine)

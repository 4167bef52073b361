"""State in host memory gives the bits of state on the device: whoever updates it, at every stage, ratio and dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.cases import sample
from tests.support.distributed import run_ranks
from tests.support.models import Task, square_loss
from tests.support.offload import offloaded, on_device, recipe, train
from tests.support.patience import Patience
from tests.support.training import Setting, adamw, assert_close, assert_same, build, sgd, shard_task, train_sharded
from tests.support.zoo import Stack
from zeroshard.engine.core.streams import Event
from zeroshard.engine.core.virtual_streams import ClockedEvent, HazardError, Pace, VirtualStreams
from zeroshard.plan.legs import Stream
from zeroshard.plan.policy import HostUpdate

TASK = Task(Stack, square_loss)
CASES = [
    # stage, micro-batches, share of the state on the host, parameters there too
    (1, 1, 1.0, False),
    (1, 2, 0.5, False),
    (2, 1, 0.5, False),
    (2, 2, 1.0, False),
    (3, 1, 1.0, False),
    (3, 1, 0.5, False),
    (3, 2, 1.0, False),
    (3, 1, 1.0, True),
    (3, 2, 1.0, True),
]


def _by_processor(rank: int, world: int) -> None:
    for stage, micro, ratio, param_too in sample(CASES):
        for param in (None, "bf16"):
            plain = recipe(stage, param)
            setting = Setting(plan=plain, steps=3, micro=micro, clip=0.5)
            offload = setting.at(offloaded(plain, ratio=ratio, param=param_too))
            on_device = train_sharded(TASK, setting, rank)
            beside = train_sharded(TASK, offload, rank)
            one_by_one = train(*shard_task(TASK, offload), TASK, offload, rank, drain=True)
            what = f"stage {stage}, {micro} micro-batches, ratio {ratio}, {param}, parameters too: {param_too}"
            assert beside.losses == one_by_one.losses, what
            assert_same(beside.parameters, one_by_one.parameters, what)
            assert beside.norms == pytest.approx(on_device.norms, rel=1e-4 if param else 1e-6), what
            # The kernel's order of operations is that of the device's; torch's own, the reference here, is another.
            assert_close(beside.parameters, on_device.parameters, 1e-6 if param is None else 1e-4, what)


@pytest.mark.parametrize("world", [1, 2])
def test_the_processor_updates_it_as_if_it_were_on_the_device_and_nothing_overlapped(world: int) -> None:
    run_ranks(world, _by_processor)


def _lion(model: nn.Module) -> torch.optim.Optimizer:
    return zeroshard.Lion(model.parameters(), lr=1e-3, weight_decay=0.1)


def _adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1)


def _rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


def _other_optimizers(rank: int, world: int) -> None:
    for optimizer, exact in ((_lion, False), (_adagrad, False), (_rmsprop, True), (sgd, True)):
        plain = recipe(3, "bf16")
        setting = Setting(plan=plain, steps=3, optimizer=optimizer)
        expected = train_sharded(TASK, setting, rank)
        got = train_sharded(TASK, setting.at(offloaded(plain)), rank)
        if exact:  # no kernel: the rule itself works on host memory
            assert_same(got.parameters, expected.parameters, optimizer.__name__)
        assert_close(got.parameters, expected.parameters, 1e-4, optimizer.__name__)


def test_so_do_the_other_element_wise_optimizers() -> None:
    run_ranks(2, _other_optimizers)


def _streamed(rank: int, world: int) -> None:
    for stage, micro, ratio, param_too in sample(CASES):
        for param, master in ((None, None), ("bf16", "float32"), ("bf16", "int16")):
            plain = recipe(stage, param, master)
            setting = Setting(plan=plain, steps=3, micro=micro)
            expected = train(*on_device(TASK, setting), TASK, setting, rank)
            setting = setting.at(offloaded(plain, HostUpdate.STREAMED, ratio, param=param_too))
            got = train(*shard_task(TASK, setting), TASK, setting, rank)
            what = f"stage {stage}, {micro} micro-batches, ratio {ratio}, {param}, master {master}, too: {param_too}"
            assert got.losses == expected.losses, what
            assert_same(got.parameters, expected.parameters, what)


def test_streamed_through_the_device_it_is_updated_as_if_it_stayed_there() -> None:
    run_ranks(2, _streamed)


def _train_on(streams: VirtualStreams | None, setting: Setting, rank: int) -> dict[str, torch.Tensor]:
    model = build(TASK)
    accumulate = setting.micro > 1
    model, optimizer = zeroshard.shard(
        model, adamw(model), plan=setting.plan, accumulate=accumulate, clip_norm=0.5, streams=streams
    )
    return train(model, optimizer, TASK, setting, rank).parameters


def _all_orders(rank: int, world: int) -> None:
    for update in HostUpdate:
        for stage, micro, ratio in ((3, 1, 0.5), (3, 1, 1.0), (1, 2, 1.0)):
            plan = offloaded(recipe(stage, "bf16"), update, ratio, param=(stage, ratio) == (3, 1.0))
            plan = replace(plan, policy=replace(plan.policy, overlap_step=True, prefetch=2))
            setting = Setting(plan=plan, steps=3, micro=micro)
            expected = _train_on(None, setting, rank)
            for pace, seed in ((Pace.EAGER, 0), (Pace.LAZY, 0), (Pace.MIXED, rank)):
                streams = VirtualStreams(Patience(), pace=pace, seed=seed)
                assert_same(_train_on(streams, setting, rank), expected, f"{update} {stage} {micro} {pace}")


def test_every_order_that_the_events_allow_gives_the_same_bits() -> None:
    run_ranks(2, _all_orders)


def _drop(waiter: Stream, awaited: Stream) -> Callable[[Stream, Event], bool]:
    return lambda stream, event: stream is waiter and isinstance(event, ClockedEvent) and event.stream is awaited


WAITS = {
    HostUpdate.STREAMED: [
        (Stream.UPLOAD, Stream.COMPUTE),
        (Stream.UPLOAD, Stream.DOWNLOAD),
        (Stream.UPDATE, Stream.UPLOAD),
        (Stream.DOWNLOAD, Stream.UPDATE),
        (Stream.GATHER, Stream.UPDATE),
    ],
    HostUpdate.PROCESSOR: [(Stream.GATHER, Stream.UPLOAD), (Stream.UPLOAD, Stream.COMPUTE)],
}


def _missing_waits(rank: int, world: int) -> list[str]:
    missed = []
    for update, pairs in WAITS.items():
        for waiter, awaited in pairs:
            streams = VirtualStreams(Patience(), pace=Pace.EAGER, drop_wait=_drop(waiter, awaited))
            try:
                _train_on(streams, Setting(plan=offloaded(recipe(3, "bf16"), update), steps=3), rank)
            except HazardError:
                continue
            missed.append(f"{update.value}: {waiter.name} after {awaited.name}")
    return missed


def test_a_planted_missing_wait_is_caught_though_the_order_was_harmless() -> None:
    for missed in run_ranks(1, _missing_waits):
        assert missed == []

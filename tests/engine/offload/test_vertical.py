"""With state in host memory and on disk the vertical schedule gives the usual bits, and moves parameters once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import zeroshard
from tests.support.cases import sample
from tests.support.disk import CountedDisk, disk_folder
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, sent
from tests.support.offload import offloaded, recipe
from tests.support.patience import Patience
from tests.support.sequence import Steps, Way, batches, sharded, trained
from tests.support.training import assert_same
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.core.virtual_streams import Pace, VirtualStreams
from zeroshard.nvme.places import Spill
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.plan.builder import Recipe
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import host_nbytes, link_traffic
from zeroshard.plan.placement import Tier
from zeroshard.plan.policy import HostUpdate, OnNonFinite
from zeroshard.plan.traffic import disk_traffic, step_traffic

MICRO = 3
PROCESSOR, STREAMED = HostUpdate.PROCESSOR, HostUpdate.STREAMED


def _on_disk(plan: Recipe, folder: Path) -> Recipe:
    """An offloaded recipe with what was in host memory in files."""
    assert plan.offload is not None
    tier = Tier.NVME if plan.offload.param else Tier.HOST
    offload = replace(plan.offload, tier=Tier.NVME, spill=Spill((str(folder),)), window_numel=1024, param_tier=tier)
    return replace(plan, offload=offload)


def _places(stage: int, param: str | None, folder: Path) -> dict[str, Recipe]:
    """Recipes of a stage by where state rests."""
    plain = recipe(stage, param)
    found = {
        "processor": offloaded(plain),
        "half": offloaded(plain, ratio=0.5),
        "streamed": offloaded(plain, STREAMED),
        "disk": _on_disk(offloaded(plain), folder),
    }
    if stage == 3:
        found |= {
            "parameters too": offloaded(plain, param=True),
            "parameters streamed": offloaded(plain, STREAMED, param=True),
            "parameters on disk": _on_disk(offloaded(plain, param=True), folder),
        }
    return found


def _bits(rank: int, world: int, folder: Path) -> None:
    for stage, param in ((1, None), (2, "bf16"), (3, None), (3, "bf16")):
        for name, plan in _places(stage, param, folder).items():
            way = Way(plan, MICRO)
            wanted, found = trained(way, rank), trained(way.upright, rank)
            assert found.losses == wanted.losses, (stage, param, name)
            # Squares of gradients that go to host memory are added in another order.
            assert found.norms == pytest.approx(wanted.norms, rel=1e-12), (stage, param, name)
            assert_same(found.parameters, wanted.parameters, f"stage {stage}, {param}, {name}")


@pytest.mark.parametrize("world", sample([2, 1, 3], 3))
def test_bits_are_those_of_the_usual_order(world: int, tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(world, _bits, folder, timeout=300)


def _skips(rank: int, world: int, folder: Path) -> None:
    for name, plan in _places(3, "fp16", folder).items():
        plan = replace(plan, policy=replace(plan.policy, on_nonfinite=OnNonFinite.SKIP))
        way = Way(plan, MICRO, scaler=partial(LossScaler, torch.device("cpu"), initial=2.0**19), steps=4)
        assert_same(trained(way.upright, rank).parameters, trained(way, rank).parameters, name)


def test_steps_in_float16_are_skipped_as_usual(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _skips, folder, timeout=300)


def _moved(rank: int, world: int, folder: Path) -> None:
    for reuse in (True, False):
        plan = _on_disk(offloaded(recipe(3, "bf16"), param=True), folder)
        plan = replace(plan, policy=replace(plan.policy, reuse=reuse))
        counted = CountedDisk(folder, rank)
        way = Way(plan, MICRO, vertical=True, shard={"tiers": {Tier.NVME: counted}})
        model, optimizer, _ = sharded(way)
        steps, memory = Steps(way, model, None), counted.made
        assert memory is not None
        for step in range(4):
            forget_sent(model)
            memory.read = memory.written = 0
            steps.run(batches(step, MICRO, rank))
            optimizer.step()
            optimizer.zero_grad()
        measured, found = sent(model), zeroshard.plan_of(model)
        planned = disk_traffic(found, micro_batches=MICRO)
        assert (memory.read, memory.written) == (planned.gathered + planned.read, planned.written), reuse
        assert planned == disk_traffic(found), "that of a step of one micro-batch"
        assert measured == step_traffic(found, micro_batches=MICRO), reuse
        usual, _, _ = sharded(Way(plan, MICRO))
        other = disk_traffic(zeroshard.plan_of(usual), micro_batches=MICRO)
        if reuse:
            assert other.gathered > 2 * planned.gathered
        else:  # the root is gathered once for both passes
            assert other.gathered == MICRO * planned.gathered
        for one in (model, usual):
            zeroshard.close(one)


def test_parameters_are_read_from_disk_once_per_step_and_direction(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _moved, folder)


def _held(rank: int, world: int, folder: Path) -> None:
    for name, plan in _places(3, "bf16", folder).items():
        model, _, _ = sharded(Way(plan, MICRO, vertical=True))
        usual, _, _ = sharded(Way(plan, MICRO))
        found, other = zeroshard.plan_of(model), zeroshard.plan_of(usual)
        host = handle_of(model).runtime.storage.tiers[Tier.HOST]
        assert host.used == host_nbytes(found) == state_bytes(found).host, name
        if name != "half":
            assert state_bytes(found).grad == 0 < state_bytes(other).grad, "no accumulators on the device"
        if name in ("processor", "disk"):
            assert link_traffic(found).down == link_traffic(other).down // 2, "gradients go down in 16 bits, not in 32"
        for one in (model, usual):
            zeroshard.close(one)


def test_gradients_rest_in_host_memory_as_with_one_micro_batch(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _held, folder)


def _all_orders(rank: int, world: int, folder: Path) -> None:
    for name, plan in _places(3, "bf16", folder).items():
        way = Way(plan, MICRO, vertical=True)
        wanted = trained(way, rank)
        for pace in (Pace.LAZY, Pace.MIXED):
            found = trained(replace(way, streams=partial(VirtualStreams, Patience(), pace=pace, seed=rank)), rank)
            assert_same(found.parameters, wanted.parameters, f"{name}, {pace}")


def test_every_order_that_the_events_allow_gives_the_same_bits(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _all_orders, folder, timeout=300)

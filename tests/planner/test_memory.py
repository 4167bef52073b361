"""What device memory takes beyond the state: what the allocator adds, and gradients that are on their way to peers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planner_cases import workload
from tests.planner.settings import BF16
from zeroshard.planner.machine.hardware import parse_cluster
from zeroshard.planner.predict.memory import StepMemory
from zeroshard.planner.predict.rows import Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.allocator import MIB, rounding
from zeroshard.planner.trace.checkpointing import Checkpointing


@pytest.mark.parametrize(
    ("nbytes", "added"),
    [
        (0, 0),
        (1, 511),
        (512, 0),
        (5 * MIB + 1, 511),
        (10 * MIB, 0),
        (193 * MIB + 8192, MIB - 8192),  # what is left of the segment is too small to be cut off
        (192 * MIB + 8192, 0),  # 1.99 MiB are left, and are somebody else's
    ],
)
def test_the_allocator_keeps_what_is_left_of_a_segment_where_it_is_too_small_to_cut(nbytes: int, added: int) -> None:
    assert rounding(nbytes) == added


def _memory(*, peers: bool, stage: int, micro: int = 1) -> StepMemory:
    setting = Setting(stage, Offload.NONE, Checkpointing.OFF)
    recipe, work = replace(BF16, peer_copies=None if peers else False), workload("tiny", 1, 64, False)
    return make_row(work, recipe, setting, parse_cluster("2xH100-80GB"), micro_batches=micro).memory


def _local(memory: StepMemory, label: str) -> int:
    return next(moment.nbytes["local gradients"] for moment in memory.moments if moment.label == label)


def test_gradients_that_peers_copy_stay_until_the_next_unit_is_reduced() -> None:
    block = 2 * 983_552  # bf16 gradients of one block of the tiny model
    copied, collected = _memory(peers=True, stage=3), _memory(peers=False, stage=3)
    assert _local(copied, "backward of blocks.1") == _local(collected, "backward of blocks.1") + block
    assert _local(copied, "optimizer step") > 0
    assert _local(collected, "optimizer step") == 0


def test_whole_gradients_are_collected_whoever_copies() -> None:
    copied, collected = (_memory(peers=peers, stage=1, micro=2) for peers in (True, False))
    assert _local(copied, "backward of blocks.1") == _local(collected, "backward of blocks.1")

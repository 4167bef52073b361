"""Flat groups of DeepSpeed's partitions whose sizes are out of the common are read as one process has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_mixed_files import OPTIMIZER, all_of, changed, held, same
from tests.support.deepspeed_files import Layer, Layout, named, write, write_stage_3
from zeroshard.checkpoint.any_checkpoint import open_checkpoint
from zeroshard.errors import CheckpointError


def test_padding_of_more_than_the_last_partition_is_read(tmp_path: Path) -> None:
    """DeepSpeed tells the last of 4 ranks of all 7 elements of padding, of which it has 2."""
    layers = [Layer({"scale": held(1, 1)})]
    source = write(tmp_path / "step7", layers, Layout((1,), 1, 4, marked=False, bf16=True), None)
    for rank in range(4):
        state = torch.load(source / f"bf16_{OPTIMIZER}".format(rank), weights_only=True)
        own, padding = state["optimizer_state_dict"], 7 if rank == 3 else 0
        own |= {"zero_stage": 1, "group_paddings": [padding]}
        if padding:
            own["single_partition_of_fp32_groups"] = [torch.empty(0)]
        torch.save(state, source / f"bf16_{OPTIMIZER}".format(rank))
    same(open_checkpoint(source), named(layers))


def test_a_number_that_an_optimizer_keeps_for_a_group_is_no_moment(tmp_path: Path) -> None:
    layers = [Layer({"scale": held(1, 2)})]
    source = write(tmp_path / "step7", layers, Layout((1,), 1, 2, marked=False), None)

    def change(state: dict[str, Any]) -> None:
        state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["RMS"] = torch.tensor(0.5)

    for rank in range(2):
        changed(source / OPTIMIZER.format(rank), change)
    same(open_checkpoint(source), named(layers))


def test_moments_are_floating_point_numbers(tmp_path: Path) -> None:
    source = write(tmp_path / "step7", [Layer({"scale": held(1, 4)})], Layout((1,), 1, 2, marked=False), None)

    def change(state: dict[str, Any]) -> None:
        kept = state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        kept["exp_avg"] = kept["exp_avg"].int()

    for rank in range(2):
        changed(source / OPTIMIZER.format(rank), change)
    with pytest.raises(CheckpointError, match=r"exp_avg of '0.scale' has dtype torch.int32"):
        open_checkpoint(source)


@pytest.mark.parametrize("told", [True, False])
def test_partitions_with_more_padding_than_deepspeed_adds_are_refused(told: bool, tmp_path: Path) -> None:
    layers = [Layer({"weight": held(1, 6)})]
    source = write(tmp_path / "step7", layers, Layout((1,), 1, 2, marked=False, bf16=True), None)

    def change(state: dict[str, Any]) -> None:
        own = state["optimizer_state_dict"]
        kept = own["base_optimizer_state"]["state"][0]
        own["single_partition_of_fp32_groups"] = [torch.cat([own["single_partition_of_fp32_groups"][0], torch.ones(4)])]
        kept |= {key: torch.cat([kept[key], torch.ones(4)]) for key in ("exp_avg", "exp_avg_sq")}
        if not told:
            del own["group_paddings"]

    for rank in range(2):
        changed(source / f"bf16_{OPTIMIZER}".format(rank), change)
    with pytest.raises(CheckpointError, match="the parameters have 6 elements, their partitions 16"):
        open_checkpoint(source)


def test_shares_of_stage_3_may_be_aligned_to_the_number_of_ranks(tmp_path: Path) -> None:
    weights = {"weight": held(1, 6, 5), "bias": held(2, 5)}
    source = write_stage_3(tmp_path / "step7", [weights], 4)

    def change(state: dict[str, Any], more: int) -> None:
        own = state["optimizer_state_dict"]
        kept = own["optimizer_state_dict"]["state"][0]
        own["fp32_flat_groups"] = [torch.cat([own["fp32_flat_groups"][0], torch.ones(more)])]
        kept |= {key: torch.cat([kept[key], torch.ones(more)]) for key in ("exp_avg", "exp_avg_sq")}

    for more, fits in ((2, True), (2, False)):
        for rank in range(4):
            changed(source / f"bf16_{OPTIMIZER}".format(rank), lambda state, more=more: change(state, more))
        if fits:
            same(open_checkpoint(source), weights)
            continue
        with pytest.raises(CheckpointError, match=r"have 10 elements on each rank, .* \[14, 14, 14, 14\]"):
            all_of(open_checkpoint(source))

"""Rows of one long sequence: tiles and parts of it give the loss of the whole, and a row is measured without a GPU."""

from __future__ import annotations

import math

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import long, rows
from benchmarks.llama import SIZES as SHORT
from benchmarks.llama import Llama
from benchmarks.long_model import SIZES, Long, place
from benchmarks.row import predicted
from tests.support.distributed import run_ranks

TOKENS = 96
TILED = Long("tiny", loss_tile=40, ffn_tile=20, kernels="default")


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(SHORT["tiny"].vocabulary, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def _whole() -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Llama(SHORT["tiny"])
    loss = model(*_batch())
    loss.backward()
    return float(loss.detach()), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def test_tiles_give_the_loss_and_gradients_of_the_whole() -> None:
    expected, gradients = _whole()
    torch.manual_seed(0)
    model = TILED.make()
    loss = model(*_batch())
    loss.backward()
    assert math.isclose(float(loss.detach()), expected, rel_tol=1e-6)
    found = {name: one.grad for name, one in model.named_parameters()}
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)


def _of_part(rank: int, world: int) -> float:
    torch.manual_seed(0)
    model = TILED.make()
    place(model, init_device_mesh("cpu", (1, world), mesh_dim_names=("dp_shard", "sp")))
    ids, targets = (whole.chunk(world, dim=1)[rank] for whole in _batch())
    return float(model(ids, targets).detach())


def test_the_mean_over_ranks_that_have_parts_is_that_of_the_whole() -> None:
    assert math.isclose(sum(run_ranks(2, _of_part)) / 2, _whole()[0], rel_tol=1e-6)


def test_sizes_are_what_the_names_say_and_every_row_is_a_measurement() -> None:
    assert round(SIZES["8b"].numel / 1e9, 2) == 8.03
    for preset, requests in long.PRESETS.items():
        for request in requests:
            words, nproc = rows.row_ranks(request, 1)
            case = long.case_of(words)
            assert case.parts == nproc, preset
            assert case.length % (128 * nproc) == 0


def test_logits_and_feed_forward_never_stand_whole_by_the_plan() -> None:
    case = long.case_of(["zeroshard3"])
    parts = predicted(case, rows.card_of("H200-141GB", 1))["parts_gib"]
    kept = 2 * case.length * SIZES["1b"].dim * SIZES["1b"].layers / 2**30
    assert math.isclose(parts["activations"], kept, rel_tol=0.01)  # a block's input for each block
    assert parts["logits and loss"] < 4 * case.length * SIZES["1b"].vocabulary / 2**30 / 32
    halves = predicted(long.case_of(["zeroshard3", "--sp", "2"]), rows.card_of("H200-141GB", 2))["parts_gib"]
    assert math.isclose(halves["activations"], kept / 2, rel_tol=0.01)


def test_a_row_is_measured_on_parts_of_a_sequence() -> None:
    small = ["--size", "tiny", "--length", "256", "--loss-tile", "64", "--ffn-tile", "128", "--first-length", "64"]
    args = long.parse(["--nproc", "2", *small, "--warmup", "0", "--repetitions", "1"])
    (found,) = rows.measured(["zeroshard3 --sp 2"], args, "benchmarks.long_row")
    assert found.row is not None, found.log
    assert math.isclose(found.row["loss"], math.log(SIZES["tiny"].vocabulary), rel_tol=0.05)
    assert (found.row["sp"], found.row["length"], found.row["world"]) == (2, 256, 2)
    assert rows.cells(found, long.describe)[1] == "tiny, 256 tokens, tiles of 64 and 128, eager"

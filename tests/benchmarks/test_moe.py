"""Rows of the mixture of experts: what they ask for, what is predicted of them, and on gloo ranks that they train."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import moe, moe_row, rows
from benchmarks.moe_model import SIZES, Moe
from benchmarks.report import Outcome, add_ratios
from benchmarks.row import predicted
from tests.support.cases import only_with_all_cases
from tests.support.installed import need

need("transformers")

SMALL = ["--size", "tiny", "--layers", "2", "--batch", "2", "--length", "32", "--tiles", "4"]
SHORT = ["--steps", "1", "--warmup", "1", "--repetitions", "1"]


def test_a_meta_model_has_as_many_parameters_as_its_shape_says() -> None:
    for size, shape in SIZES.items():
        with torch.device("meta"):
            model = Moe(size, layers=2, checkpointing=True, tiles=4).make()
        assert sum(parameter.numel() for parameter in model.parameters()) == shape.numel(2), size
    assert round(SIZES["30b-a3b"].numel(moe.ALL_LAYERS) / 1e9, 1) == 30.5


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("preset", moe.PRESETS)
def test_every_row_is_a_measurement(preset: str, nproc: int) -> None:
    for request in moe.rows_of(preset, nproc):
        case = moe.case_of(request.split())
        assert case.parts in (1, nproc)
        assert case.checkpointing
        assert (case.offload == "none") == (preset == "speed")


def test_a_tiled_loss_is_that_of_all_tokens_and_checkpointing_changes_no_gradient() -> None:
    ids = torch.randint(SIZES["tiny"].vocabulary, (2, 32), generator=torch.Generator().manual_seed(0))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for checkpointing, tiles in ((False, 0), (True, 4)):
        torch.manual_seed(0)
        model = Moe("tiny", 2, checkpointing, tiles).make()
        loss = model(ids, ids.roll(-1, 1))
        loss.backward()
        router = model.get_submodule("inner.model.layers.0.mlp.gate").get_parameter("weight").grad
        assert router is not None
        found.append((loss.detach(), router))
    assert math.isclose(float(found[0][0]), math.log(SIZES["tiny"].vocabulary), rel_tol=0.05)
    torch.testing.assert_close(found[1], found[0])


def test_more_layers_and_more_state_on_the_card_take_more_of_it() -> None:
    cluster = rows.card_of("H200-141GB", 2)
    figures = {
        words: predicted(moe.case_of(f"zeroshard3 --batch 1 {words}".split()), cluster)
        for words in ("--layers 2", "--layers 4", "--layers 4 --ep 2", "--layers 4 --offload streamed")
    }
    assert figures["--layers 2"]["allocated_gib"] < figures["--layers 4"]["allocated_gib"]
    assert figures["--layers 4 --offload streamed"]["allocated_gib"] < figures["--layers 4"]["allocated_gib"]
    assert figures["--layers 4 --offload streamed"]["host_gib"] > figures["--layers 4"]["host_gib"] == 0
    assert figures["--layers 4 --ep 2"]["parts_gib"]["moments"] == figures["--layers 4"]["parts_gib"]["moments"]


def test_as_many_layers_are_found_as_fit_and_no_more() -> None:
    def case(layers: int) -> rows.Case:
        return moe.case_of(["zeroshard3", "--batch", "1", "--layers", str(layers)])

    found = rows.most_layers(case, rows.card_of("A100-40GB", 1), limit=moe.ALL_LAYERS)
    assert [layers for layers, _ in found] == list(range(1, len(found) + 1))
    # 14 bytes a parameter rest there: with bf16 parameters and gradients, the rest of master weights, and two moments.
    assert 40 * 2**30 / 14 * 0.6 < SIZES["30b-a3b"].numel(len(found)) < 40 * 2**30 / 14


def test_ratios_are_to_the_floor_of_the_same_setting() -> None:
    same = {"layers": 2, "batch": 2, "compiled": False}
    outcomes = [
        Outcome("floor", {**same, "engine": "floor", "step_s": 1.0}),
        Outcome("zeroshard3", {**same, "engine": "zeroshard3", "step_s": 1.05}),
        Outcome("zeroshard3 --compile", {**same, "engine": "zeroshard3", "step_s": 1.0, "compiled": True}),
    ]
    add_ratios(outcomes, rows.SETTING)
    assert [outcome.row["ratio"] for outcome in outcomes if outcome.row] == [1.0, 1.05, None]


def _measured(*requests: str, nproc: int) -> list[Outcome]:
    args = moe.parse([*(word for row in requests for word in ("--run", row)), "--nproc", str(nproc), *SMALL, *SHORT])
    found = rows.measured(requests, args, "benchmarks.moe_row")
    for outcome in found:
        assert outcome.row is not None, outcome.log
        # Random tokens: about the logarithm of the vocabulary.
        assert math.isclose(outcome.row["loss"], math.log(SIZES["tiny"].vocabulary), rel_tol=0.05)
        assert outcome.row["params"] == SIZES["tiny"].numel(2)
    return found


def test_divided_experts_train_and_the_plan_is_predicted() -> None:
    (found,) = _measured("zeroshard3 --ep 2", nproc=2)
    assert found.row is not None
    assert found.row["planned"]["stage"] == 3
    assert "zeroshard3 ep 2" in _cells(found)[0]


def _cells(outcome: Outcome) -> list[str]:
    cells = rows.cells(outcome, moe.describe)
    assert len(cells) == len(rows.COLUMNS)
    return cells


@only_with_all_cases
def test_all_engines_are_measured_and_put_beside_the_floor() -> None:
    found = _measured("floor", "zeroshard3", "zeroshard3 --offload streamed --host-share 0.5", "fsdp2", nproc=2)
    ratios = [outcome.row["ratio"] for outcome in found if outcome.row]
    assert ratios[0] == 1.0
    assert None not in ratios
    assert found[2].row is not None
    assert found[2].row["planned"]["share_on_host"] >= 0.5


def test_options_reach_the_rows() -> None:
    args = moe_row.parse(["--engine", "floor", "--no-checkpointing", "--tiles", "0", "--cap-gib", "80"])
    assert (moe_row.case_of(args).checkpointing, args.tiles, args.cap_gib) == (False, 0, 80.0)

"""`zeroshard plan --meshes`: every layout of a cluster, what it takes, and why one of them is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support import expert_model
from zeroshard.errors import PlanError
from zeroshard.plan.builder import Recipe
from zeroshard.planner.choose.layout_choice import choose_layout
from zeroshard.planner.machine.hardware import parse_cluster
from zeroshard.planner.predict.layouts import Layout, Search, meshes
from zeroshard.planner.predict.rows import Setting
from zeroshard.planner.show.cli import app
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.divided import Parts
from zeroshard.planner.trace.sized import Decoder, Sizes
from zeroshard.planner.trace.sources import module_source, sized_source
from zeroshard.planner.trace.workload import Workload
from zeroshard.sharding.cut import Cut

OFF = (Checkpointing.OFF,)


def _recipe(_: Setting) -> Recipe:
    return Recipe()


def _search(work: Workload, cluster: str, sequences: int, **options: Any) -> Search:
    return Search(work, parse_cluster(cluster), sequences, _recipe, OFF, **options)


@pytest.fixture(scope="module")
def decoder() -> Workload:
    return Workload(sized_source(3e7, 4, 256), 1, 256)


def test_every_mesh_has_all_gpus_and_tensor_parallelism_within_a_node() -> None:
    found = list(meshes(parse_cluster("16xH100")))
    assert len(found) == len(set(found))
    assert all(mesh.world_size == 16 and mesh.size(("tp",)) <= 8 for mesh in found)
    assert any(mesh.size(("dp_replicate",)) == 2 for mesh in found)
    assert {mesh.size(("pp",)) for mesh in found} == {1, 2, 4, 8, 16}


def test_a_layout_computes_and_holds_a_rank_s_part(decoder: Workload) -> None:
    layouts = _search(decoder, "2xH100", 2, stages=(2,)).run()
    by_mesh = {tuple(axis.size for axis in layout.mesh.axes): layout for layout in layouts.found}
    data, tensor, sequence, staged = (
        by_mesh[sizes] for sizes in ((1, 1, 2, 1, 1, 1), (1, 1, 1, 1, 1, 2), (1, 1, 1, 2, 1, 1), (2, 1, 1, 1, 1, 1))
    )
    assert tensor.row.plan.parameter_numel < 0.6 * data.row.plan.parameter_numel
    assert sequence.row.plan.parameter_numel == data.row.plan.parameter_numel
    assert _held(sequence, "activations") < 0.6 * _held(data, "activations")
    assert data.sent_seconds == {}
    assert set(tensor.sent_seconds) == {"tp"}
    assert set(sequence.sent_seconds) == {"sp"}
    assert staged.pipeline is not None
    assert sum(stage.plan.parameter_numel for stage in staged.pipeline.stages) == data.row.plan.parameter_numel
    assert 0 < staged.bubble < 0.8
    assert [layout.row.micro_batches for layout in (data, tensor, sequence, staged)] == [1, 2, 2, 2]


def _held(layout: Layout, kind: str) -> int:
    return layout.row.memory.peak.nbytes[kind]


def test_what_can_not_be_is_left_out_by_its_sentence(decoder: Workload) -> None:
    refused = _search(decoder, "8xH100", 4, stages=(0,)).run().refused
    said = "\n".join(refused)
    assert "axis 'ep' of 2 ranks: Decoder has no experts that are divided over ranks" in said
    assert "4 sequences a step do not go over 8 data ranks in micro-batches of 1" in said
    assert "num_attention_heads is 2, which 4 ranks do not divide" in said
    assert "the model has 1 heads of queries on each of 2 ranks of 'tp', which 2 ranks do not divide" in said
    assert "6 layers can't have 8 parts" in said
    odd = Workload(module_source("odd", partial(expert_model.build, (0.0,) * 6)), 1, 8)
    with pytest.raises(PlanError, match=r"blocks.0.mlp.experts has 6 experts, which 4 ranks of axis"):
        replace(odd, parts=Parts(experts=4))


def test_the_choice_is_the_fastest_and_each_mesh_has_its_reason(decoder: Workload) -> None:
    layouts = _search(decoder, "2xH100", 2).run()
    choice = choose_layout(layouts)
    assert choice.best is not None
    quickest = min(layout.seconds for layout in layouts.found)
    assert choice.best.seconds <= 1.01 * quickest
    assert {layout.mesh for layout in layouts.found} == set(choice.reasons)
    assert choice.reasons[choice.best.mesh].startswith("The choice: nothing that fits")
    tiny = replace(parse_cluster("2xH100").gpu, memory=2 * 2**30)
    none = Search(decoder, replace(parse_cluster("2xH100"), gpu=tiny), 2, _recipe, OFF).run()
    assert not none.found
    assert all(why.startswith("Does not fit: at least") for why in choose_layout(none).reasons.values())


def test_the_command_line_prints_layouts_for_people_and_machines() -> None:
    model = ["--params", "3e7", "--layers", "4", "--hidden", "256", "--seq", "256", "--cluster", "2xH100"]
    run: Callable[..., Any] = partial(CliRunner().invoke, app)
    found = json.loads(run([*model, "--meshes", "--price", "2", "--json"]).output)
    assert found["choice"]["mesh"]["dp_shard"] == 2
    assert sum(layout["chosen"] for layout in found["layouts"]) == 1
    assert all(layout["usd_per_1e9_tokens"] > 0 for layout in found["layouts"])
    assert {layout["mesh"]["pp"] for layout in found["layouts"]} == {1, 2}
    text = run([*model, "--meshes", "--global-batch", "8"]).output
    assert "8 x 256 a step" in text
    assert "slower than the choice" in text
    refused = run([*model, "--global-batch", "8"])
    assert "--global-batch is for --meshes" in str(refused.exception)


class _Tied(Decoder):
    def __init__(self) -> None:
        super().__init__(Sizes(1, 128, 2, 64, 64))
        self.head.weight = self.embed.weight


def test_a_tied_head_is_divided_with_its_embedding() -> None:
    batch = {"ids": torch.zeros(1, 8, dtype=torch.int64), "labels": torch.zeros(1, 8, dtype=torch.int64)}
    work = Workload(
        module_source("tied", lambda: (_Tied(), lambda samples, length: batch)), 1, 8, parts=Parts(tensor=2)
    )
    held = {p.name: (p.shape, p.cut) for unit in work.units for p in unit.parameters}
    assert held["embed.weight"] == ((32, 128), Cut("tp", 0, 2))
    assert "head.weight" not in held

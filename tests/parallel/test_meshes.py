"""All axes on one mesh: pipeline stages, sequences, experts and tensors divided at once train as one process does.

`ZEROSHARD_ALL_MESHES=1` runs every mesh of at most eight ranks at every stage of ZeRO; a sample runs by default.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.mesh_model import Layout, Run, State, in_one_process, layouts
from tests.support.parallel_model import Step, assert_close, assert_same, whole_state
from zeroshard.checkpoint.reader import CheckpointReader

WHOLE_MATRIX = os.environ.get("ZEROSHARD_ALL_MESHES") == "1"
SAMPLE = [Layout(2, 1, 1, 1, 1, 2, 2), Layout(1, 1, 1, 1, 2, 2, 3), Layout(2, stage=3, heads=2)]
MESHES = [mesh for ranks in range(1, 9) for mesh in layouts(ranks)] if WHOLE_MATRIX else []
CHUNK = 6
"""Cells that one set of processes runs: process groups are never given back whole."""
Wanted = dict[int, tuple[list[Step], State]]


def _trains(rank: int, world: int, cells: list[Layout], wanted: Wanted) -> None:
    for layout in cells:
        run = Run.start(layout)
        steps = run.train(range(3))
        own = dict(run.model.named_parameters())
        expected, parameters = wanted[layout.readers]
        held = {name: value for name, value in parameters.items() if name in own}
        assert held
        assert_close((steps, zeroshard.full_state_dict(run.model)), (expected, held), layout)
        run.close()


def _assert_alike(cells: Sequence[Layout]) -> None:
    wanted = {readers: in_one_process(readers) for readers in {layout.readers for layout in cells}}
    run_ranks(cells[0].ranks, _trains, cells, wanted, timeout=300)


def test_meshes_of_several_axes_train_as_one_process_does() -> None:
    _assert_alike(SAMPLE)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_trains_as_one_process_does(mesh: Layout) -> None:
    _assert_alike([replace(mesh, stage=stage) for stage in range(4)])


def _states(rank: int, world: int, cells: Sequence[Layout]) -> list[State]:
    """Without clipping, for norms are summed in another order."""
    found: list[State] = []
    for layout in cells:
        run = Run.start(layout, clip_norm=0.0)
        run.train(range(2))
        found.append(whole_state(run.model))
        run.close()
    return found


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh.stages > 1 and mesh.ranks <= 4], ids=str)
def test_stages_change_no_bit_of_a_mesh(mesh: Layout) -> None:
    cells = [replace(mesh, stage=stage) for stage in range(4)]
    alone = [replace(layout, stages=1) for layout in cells]
    wanted = run_ranks(alone[0].ranks, _states, alone, timeout=300)[0]
    for number, layout in enumerate(cells):
        held: State = {}
        for states in run_ranks(mesh.ranks, _states, [layout], timeout=300):
            for name, value in states[0].items():
                held.setdefault(name, value)
        assert held.keys() == wanted[number].keys()
        assert_same(held, wanted[number], layout)


def _moves(rank: int, world: int, folder: str, cells: list[Layout], first: int) -> None:
    """The checkpoint `first` - 1 is loaded in each layout and saved again: the same tensors, bit for bit."""
    if first == 0:
        run = Run.start(cells[0])
        run.train(range(1))
        zeroshard.save(run.model, folder, "0")
        run.close()
    for number, layout in enumerate(cells, max(first, 1)):
        run = Run.start(layout)
        zeroshard.load(run.model, folder, str(number - 1))
        zeroshard.save(run.model, folder, str(number))
        run.close()
        saved, again = (CheckpointReader(Path(folder) / str(tag)) for tag in (number - 1, number))
        assert saved.manifest.tensors.keys() == again.manifest.tensors.keys()
        assert len(saved.manifest.tensors) > 30
        for name in saved.manifest.tensors if rank == 0 else ():
            assert torch.equal(saved.tensor(name).read(), again.tensor(name).read()), f"{layout}: {name}"
        saved.close()
        again.close()


def test_a_checkpoint_goes_through_meshes_of_several_axes(tmp_path: Path) -> None:
    run_ranks(4, _moves, str(tmp_path), SAMPLE, 0)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", sorted({mesh.ranks for mesh in MESHES}))
def test_a_checkpoint_goes_through_every_mesh_and_stage(ranks: int, tmp_path: Path) -> None:
    """From one process through all meshes of a number of ranks."""
    run_ranks(1, _moves, str(tmp_path), [Layout()], 0)
    own = [replace(mesh, stage=stage) for mesh in MESHES for stage in range(4) if mesh.ranks == ranks]
    for start in range(0, len(own), CHUNK):
        run_ranks(ranks, _moves, str(tmp_path), own[start : start + CHUNK], start + 2, timeout=300)

"""Checkpoints of divided models: whole tensors, which load in any other layout and stage, moments bit for bit."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.parallel_model import Layout, assert_same, build, sharded, train, whole_state

WHOLE_MATRIX = os.environ.get("ZEROSHARD_ALL_MESHES") == "1"


def _moved(rank: int, world: int, folder: str, layouts: list[Layout], background: bool) -> None:
    for layout in layouts:
        model, optimizer = sharded(layout)
        train(model, optimizer, layout.reader, range(1))
        saved = whole_state(model)
        zeroshard.save(model, folder, f"{layout.tensor}-{layout.stage}", background=background)
        zeroshard.wait_for_checkpoint(model)
        zeroshard.close(model)
        for other in layouts:
            if other == layout and not WHOLE_MATRIX:
                continue
            model, optimizer = sharded(other)
            zeroshard.load(model, folder, f"{layout.tensor}-{layout.stage}")
            assert_same(whole_state(model), saved, f"{layout} into {other}")
            zeroshard.close(model)


def test_a_checkpoint_loads_in_any_other_layout(tmp_path: Path) -> None:
    layouts = [Layout(2, 2, 3), Layout(4, 1, 1)]
    run_ranks(4, _moved, str(tmp_path), layouts, True, timeout=300)


@pytest.mark.skipif(not WHOLE_MATRIX, reason="set ZEROSHARD_ALL_MESHES=1")
def test_a_checkpoint_of_four_ranks_loads_in_any_other_layout(tmp_path: Path) -> None:
    shapes = itertools.product(((4, 1), (2, 2), (1, 4)), range(4))
    run_ranks(4, _moved, str(tmp_path), [Layout(*shape, stage) for shape, stage in shapes], False, timeout=900)


def _goes_on(rank: int, world: int, folder: str) -> None:
    for stage in range(1, 4):
        states = []
        for saves in (True, False):
            model, optimizer = sharded(Layout(2, 2, stage))
            train(model, optimizer, Layout(2, 2, stage).reader, range(1))
            if saves:
                zeroshard.save(model, folder, f"stage{stage}")
            train(model, optimizer, Layout(2, 2, stage).reader, range(1, 3))
            states.append(whole_state(model))
            zeroshard.close(model)
        assert_same(*states, f"stage {stage}")


def test_training_goes_on_after_a_checkpoint_of_data_ranks_and_divided_weights(tmp_path: Path) -> None:
    """Data ranks have shares of other weights, so they exchange other ones while they save."""
    run_ranks(4, _goes_on, str(tmp_path))


def _exported(rank: int, world: int, folder: str) -> None:
    layout = Layout(1, 2, 3)
    model, optimizer = sharded(layout)
    train(model, optimizer, layout.reader, range(1))
    wanted = zeroshard.full_state_dict(model)
    zeroshard.save(model, folder, "last")
    zeroshard.close(model)
    if rank == 0:
        from zeroshard.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        found = get_fp32_state_dict_from_zero_checkpoint(folder)
        plain = build()
        plain.load_state_dict(found)
        assert_same(dict(plain.state_dict()), wanted, "zero_to_fp32")


def test_weights_are_exported_whole(tmp_path: Path) -> None:
    run_ranks(2, _exported, str(tmp_path))

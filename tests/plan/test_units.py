"""Units: the outermost repeated block, large leaves outside of the blocks, and the root for all the rest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.sharding.units import OWN_UNIT_NUMEL, find_units


class _Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)


class _Other(_Block):
    pass


class _Stage(nn.Module):
    """A block that repeats blocks itself, as Swin's stages do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))


class _Language(nn.Module):
    def __init__(self, vocabulary: int = OWN_UNIT_NUMEL // 4, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 4)
        self.layers = nn.ModuleList(_Block() for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def names(model: nn.Module, selected: Sequence[str] | None = None) -> list[str]:
    return [unit.name for unit in find_units(model, selected)]


def test_blocks_embedding_and_head_are_units_and_the_rest_is_the_root() -> None:
    units = find_units(_Language())
    assert [unit.name for unit in units] == ["", "embedding", "layers.0", "layers.1", "layers.2", "head"]
    assert [parameter.name for parameter in units[0].parameters] == ["norm.weight", "norm.bias"]
    assert [parameter.name for parameter in units[2].parameters] == [
        "layers.0.up.weight",
        "layers.0.up.bias",
        "layers.0.down.weight",
        "layers.0.down.bias",
    ]


def test_a_small_embedding_stays_with_the_root() -> None:
    assert names(_Language(vocabulary=8)) == ["", "layers.0", "layers.1", "layers.2"]


def test_tied_weights_belong_to_the_root_and_keep_their_other_name() -> None:
    root = find_units(_Language(tied=True))[0]
    assert "embedding.weight" in [parameter.name for parameter in root.parameters]
    assert root.aliases == (("head.weight", "embedding.weight"),)
    assert names(_Language(tied=True)) == ["", "layers.0", "layers.1", "layers.2"]


def test_a_parameter_shared_by_two_blocks_belongs_to_the_root() -> None:
    one, other = _Block(), _Block()
    other.up.weight = one.up.weight
    model = nn.Sequential(one, other)
    root, first, second = find_units(model)
    assert [parameter.name for parameter in root.parameters] == ["0.up.weight"]
    assert root.aliases == (("1.up.weight", "0.up.weight"),)
    assert len(first.parameters) == len(second.parameters) == 3


def test_a_parameter_tied_inside_one_block_stays_in_it() -> None:
    block = _Block()
    block.up.weight = block.down.weight
    model = nn.Sequential(block, _Block())
    first = find_units(model)[1]
    assert first.aliases == (("0.down.weight", "0.up.weight"),)


def test_a_module_called_under_two_names_is_owned_by_the_root() -> None:
    block = _Block()
    model = nn.Sequential(block, _Block(), block)
    assert [unit.name for unit in find_units(model) if unit.parameters] == ["", "1"]


def test_of_nested_repeats_the_outermost_is_the_unit() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList(_Stage() for _ in range(2))
    assert names(model) == ["", "stages.0", "stages.1"]


def test_a_single_stage_is_walked_into() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList([_Stage()])
    assert names(model) == ["", "stages.0.blocks.0", "stages.0.blocks.1"]


def test_a_list_of_sequentials_gives_the_sequentials() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    assert names(model) == ["", "layers.0", "layers.1"]


def test_lists_are_never_units_themselves() -> None:
    model = nn.Module()
    model.towers = nn.ModuleList(nn.ModuleList(_Block() for _ in range(2)) for _ in range(2))
    assert names(model) == ["", "towers.0.0", "towers.0.1", "towers.1.0", "towers.1.1"]


def test_blocks_of_different_classes_are_repeats_of_their_own_class() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([_Block(), _Other(), _Block(), _Other()])
    assert names(model) == ["", "layers.0", "layers.1", "layers.2", "layers.3"]


def test_modules_without_parameters_are_no_units() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))
    assert names(model) == ["", "0", "3"]


def test_a_model_that_is_one_leaf_is_the_root() -> None:
    units = find_units(nn.Linear(3, 2))
    assert [unit.name for unit in units] == [""]
    assert [parameter.shape for parameter in units[0].parameters] == [(2, 3), (2,)]


def test_the_root_is_there_without_parameters_of_its_own() -> None:
    assert find_units(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[0].parameters == ()


def test_dtype_and_trainability_are_noted() -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    model.bias.requires_grad_(False)
    weight, bias = find_units(model)[0].parameters
    assert (weight.dtype, weight.trainable, bias.trainable) == (torch.bfloat16, True, False)


def test_a_model_on_the_meta_device_has_units() -> None:
    assert names(_Language().to("meta")) == names(_Language())


def test_selected_units_replace_the_ones_found() -> None:
    units = find_units(_Language(), ["layers.1", "head"])
    assert [unit.name for unit in units] == ["", "layers.1", "head"]
    assert "layers.0.up.weight" in [parameter.name for parameter in units[0].parameters]


def test_no_selected_unit_puts_everything_into_the_root() -> None:
    assert names(_Language(), []) == [""]


@pytest.mark.parametrize(
    ("selected", "words"),
    [
        (["layers.7"], ["no submodule 'layers.7'", "named_modules"]),
        ([""], ["no submodule ''"]),
        (["layers.1", "layers.1"], ["twice"]),
        (["layers.1.up", "layers.1"], ["'layers.1.up' lies inside the unit 'layers.1'", "nested"]),
        (["layers"], ["'layers'", "no forward"]),
    ],
)
def test_selected_units_that_cannot_be_are_refused(selected: list[str], words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        find_units(_Language(), selected)
    assert all(word in str(caught.value) for word in words), str(caught.value)

"""Optimizers of bitsandbytes become rules of ours, by their class and options; the package is not needed to tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.beside import needs_torchao, use_beside
from tests.support.distributed import run_ranks
from zeroshard.errors import PlanError
from zeroshard.optim.clients import client_source


def _made(name: str, bits: int = 32, **options: Any) -> torch.optim.Optimizer:
    """One as bitsandbytes makes it: the class's module, groups with keys of its own, and options in `args`."""

    class Made(torch.optim.Optimizer):
        def __init__(self) -> None:
            groups = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "alpha": 0.0, "t_beta3": None}
            super().__init__([nn.Parameter(torch.zeros(64, 64))], groups)
            known = {"optim_bits": bits, "min_8bit_size": 4096, "max_unorm": 0.0, "skip_zeros": False}
            self.mng = SimpleNamespace(pid2config={}, module_weight_config_triple=[])
            self.args = SimpleNamespace(**{**known, **options})

    Made.__name__, Made.__module__ = name, "bitsandbytes.optim.made"
    return Made()


@pytest.mark.parametrize(
    ("name", "becomes"),
    [("Adam", "AdamW"), ("AdamW32bit", "AdamW"), ("PagedAdamW", "AdamW"), ("PagedLion32bit", "Lion"), ("Lion", "Lion")],
)
def test_each_becomes_the_rule_that_it_computes(name: str, becomes: str) -> None:
    made = _made(name)
    source = client_source(made, made.param_groups, allow_untested=False)
    assert (source.name, source.blocks) == (becomes, None)
    assert source.groups is made.param_groups, "schedulers of the user's optimizer change what is used"
    if becomes == "AdamW":
        assert source.groups[0]["decoupled"] is True, "bitsandbytes' Adam decouples the decay, too"


def _in_blocks(rank: int, world: int) -> None:
    use_beside()
    for name in ("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit", "AdamW"):
        made = _made(name, bits=8)
        source = client_source(made, made.param_groups, allow_untested=False)
        assert source.blocks is not None
        assert (source.name, source.blocks.bits, source.blocks.size) == ("AdamW8bit", 8, 256)
        assert source.groups[0]["weight_decay"] == 0.1


@needs_torchao
def test_8_bits_are_kept_in_blocks() -> None:
    run_ranks(1, _in_blocks)


@pytest.mark.parametrize(
    ("name", "bits", "options", "said"),
    [
        ("Lion8bit", 8, {}, "Lion8bit of bitsandbytes has no sharded form"),
        ("SGD8bit", 8, {}, "SGD8bit of bitsandbytes has no sharded form"),
        ("AdEMAMix", 32, {}, "AdEMAMix of bitsandbytes has no sharded form"),
        ("AdamW", 32, {"max_unorm": 1.0}, "max_unorm, skip_zeros and a min_8bit_size"),
        ("AdamW8bit", 8, {"min_8bit_size": 16384}, "min_8bit_size other than 4096"),
    ],
)
def test_what_has_no_sharded_form_is_refused_by_name(name: str, bits: int, options: dict[str, Any], said: str) -> None:
    made = _made(name, bits, **options)
    with pytest.raises(PlanError, match=said):
        client_source(made, made.param_groups, allow_untested=False)


@pytest.mark.parametrize("by_module", [False, True])
def test_hyper_parameters_of_single_tensors_are_refused_and_their_bits_are_not(by_module: bool) -> None:
    made, module = _made("AdamW"), nn.Linear(2, 2)
    module.weight = made.param_groups[0]["params"][0]
    exception: dict[str, Any] = {"optim_bits": 32}
    if by_module:
        vars(made)["mng"].module_weight_config_triple.append((module, "weight", exception))
    else:
        vars(made)["mng"].pid2config[id(module.weight)] = exception
    assert client_source(made, made.param_groups, allow_untested=False).name == "AdamW"
    exception["lr"] = 1e-4
    with pytest.raises(PlanError, match="a parameter of group 0 its own lr"):
        client_source(made, made.param_groups, allow_untested=False)

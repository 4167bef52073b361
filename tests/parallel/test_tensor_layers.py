"""`tensor_parallel.partition_config`: which layers it names, what is refused, and what a parameter keeps."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.parallel_model import BATCH, CLIP, build, in_one_process, loss_of, tokens
from zeroshard.errors import PlanError
from zeroshard.sharding.dtensors import ranks_of_axis

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": CLIP,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
UP, DOWN = r".*\.mlp\.up\.weight", r".*\.mlp\.down\.weight"


def _config(*specs: Any, ranks: Any = 2, **more: Any) -> dict[str, Any]:
    return {**BASE, "tensor_parallel": {"autotp_size": ranks, "partition_config": {"layer_specs": list(specs), **more}}}


def _column(*patterns: str) -> dict[str, Any]:
    return {"patterns": list(patterns), "partition_type": "column"}


def _row(*patterns: str) -> dict[str, Any]:
    return {"patterns": list(patterns), "partition_type": "row"}


class _Tied(nn.Module):
    """An embedding whose weight the head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


class _Transposed(nn.Module):
    """A linear layer of another class, as GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 12))


REFUSED: list[tuple[Any, Any, str]] = [
    (build, _config({"patterns": ["*up.weight"]}), r"layer_specs[0].patterns: '*up.weight' is no regular expression"),
    (build, _config("up"), "layer_specs[0] is 'up': give an object with patterns and partition_type"),
    (build, _config({"patterns": [3]}), "layer_specs[0].patterns is [3]: give a list of regular expressions"),
    (build, _config(_column(UP), ranks=2, use_default_specs=True), "give layer_specs, and use_default_specs false"),
    (lambda: nn.Sequential(nn.Linear(4, 5)), _config(_column("0.weight")), "out_features of '0' is 5, which 2 ranks"),
    (lambda: nn.Sequential(nn.Linear(7, 4)), _config(_row("0.weight")), "in_features of '0' is 7, which 2 ranks"),
    (lambda: nn.Sequential(nn.Embedding(9, 4)), _config(_row("0.weight")), "num_embeddings of '0' is 9, which 2 ranks"),
    (_Tied, _config(_row("embedding.weight")), "('embedding' row, 'head' not divided), and would part"),
    (_Tied, _config(_column("head.weight", "embedding.weight")), "('embedding' column, 'head' column), and would part"),
    (lambda: nn.Sequential(_Transposed()), _config(_column("0.weight")), "names '0', a _Transposed with a weight of"),
]


def _refused(rank: int, world: int) -> None:
    """Each time before anything is divided."""
    for make, config, said in REFUSED:
        model = make()
        with pytest.raises(PlanError, match=re.escape(said)):
            zeroshard.initialize(model=model, config=config)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), said


def test_what_patterns_can_not_divide_is_refused_in_a_sentence() -> None:
    run_ranks(2, _refused)


def _hooked(rank: int, world: int) -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = build()
        getattr(model.get_parameter("blocks.0.mlp.up.weight"), register)(lambda _: None)
        with pytest.raises(
            PlanError, match=r"'blocks.0.mlp.up.weight' has a hook on its gradient, which dividing would"
        ):
            zeroshard.initialize(model=model, config=_config(_column(UP), _row(DOWN)))


def test_hooks_on_gradients_that_dividing_would_drop_are_refused() -> None:
    run_ranks(2, _hooked)


def _written(rank: int, world: int) -> None:
    model = build()
    for name, parameter in model.named_parameters():
        vars(parameter)["mark"] = name
    zeroshard.initialize(model=model, config=_config(_column(UP), _row(DOWN)))
    assert all(vars(parameter)["mark"] == name for name, parameter in model.named_parameters())


def test_what_a_script_wrote_on_a_parameter_stays_on_its_divided_one() -> None:
    run_ranks(2, _written)


def _trained(rank: int, world: int) -> None:
    """With the number of ranks as a fraction, one pattern without a list, and an embedding by row."""
    wanted, _ = in_one_process(1, 2)
    model = build()
    config = _config({"patterns": UP}, _row(DOWN, r"embedding\.weight"), ranks=2.0)
    del config["optimizer"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer, config=config)
    assert ranks_of_axis(model, "tp") == 2
    assert isinstance(model.get_parameter("embedding.weight"), DTensor)
    for step, (loss, norm) in enumerate(wanted):
        found = loss_of(engine, tokens(step, 0))
        engine.backward(found)
        engine.step()
        assert abs(float(found.detach()) - loss) < 1e-6
        assert engine.get_global_grad_norm() == pytest.approx(norm, abs=1e-6)


def test_an_embedding_by_row_and_layers_train_as_in_one_process() -> None:
    run_ranks(2, _trained)


def _tied(rank: int, world: int) -> None:
    """The embedding and the head stay one parameter, of which each rank has half of the rows."""
    model = _Tied()
    zeroshard.initialize(model=model, config=_config(_row("embedding.weight"), _column("head.weight")))
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.head.weight, DTensor)


def test_a_weight_of_two_names_is_divided_once() -> None:
    run_ranks(2, _tied)

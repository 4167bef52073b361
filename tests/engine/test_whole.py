"""Modules that are not taken apart (scripted, or reading their children's parameters) train as in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, Task
from tests.support.training import Setting, assert_close, build, full_parameters, sgd, train_sharded
from zeroshard.errors import PlanError, UsageError
from zeroshard.sharding.units import find_units

WIDTH, LARGE = 16, 1100
"""A linear layer of WIDTH x LARGE is large enough to be a unit of its own."""


class _Around(nn.Module):
    """A module among others; its input is (2, 5, width)."""

    def __init__(self, inner: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.inp, self.inner, self.out = nn.Linear(WIDTH, width), inner, nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(self.inp(x)))


class _Attends(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.att = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.att(x, x, x)[0]


class _OwnAttention(nn.MultiheadAttention):
    pass


class _Tails(nn.Module):
    """An adaptive softmax, of which each rank's batch uses other tails."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 3000, [1000, 2000], div_value=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(x.shape[0] * x.shape[1]) + (0 if float(x.detach().sum()) > 0 else 1500)
        return self.softmax(x.flatten(0, 1), tokens)[1].expand(2, 5, WIDTH)


class _Scale(nn.Module):
    """A parametrization with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(LARGE, WIDTH))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factors


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, LARGE), nn.Tanh(), nn.Linear(LARGE, WIDTH))


def _parametrized() -> nn.Module:
    up, down = nn.Linear(WIDTH, LARGE), nn.Linear(LARGE, WIDTH)
    parametrize.register_parametrization(up, "weight", _Scale())
    parametrize.register_parametrization(up, "weight", _Scale())
    return nn.Sequential(up, nn.Tanh(), parametrizations.weight_norm(down))


def _spectral() -> nn.Module:
    up = parametrizations.spectral_norm(nn.Linear(WIDTH, LARGE)).eval()  # in training it counts forwards
    old = nn.utils.weight_norm(nn.Linear(LARGE, WIDTH))
    return nn.Sequential(up, nn.Tanh(), old)


def _exported() -> nn.Module:
    return torch.export.export(_mlp(), (torch.randn(2, 5, WIDTH),)).module()


def _traced(module: nn.Module) -> nn.Module:
    traced = torch.jit.trace(module, torch.randn(2, 5, WIDTH))
    assert isinstance(traced, nn.Module)
    return traced


def _encoder(layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, LARGE, dropout=0.0, batch_first=True)
    return layer if layers == 1 else nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class _Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.jit.script(_mlp()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class _Block(nn.Module):
    """A block of which a part is scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = torch.jit.script(_mlp()), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


KINDS = {
    "attention": lambda: _Around(_Attends(nn.MultiheadAttention(128, 4, batch_first=True)), 128),
    "attention of a subclass": lambda: _Around(_Attends(_OwnAttention(128, 4, batch_first=True)), 128),
    "attention with other keys": lambda: _Around(
        _Attends(nn.MultiheadAttention(128, 4, kdim=128, vdim=128, add_bias_kv=True, batch_first=True)), 128
    ),
    "an encoder layer": lambda: _Around(_encoder(1)),
    "encoder layers": lambda: _Around(_encoder(2)),
    "a decoder layer": lambda: _Decoder(),
    "parametrizations": lambda: _Around(_parametrized()),
    "weight and spectral norm": lambda: _Around(_spectral()),
    "an LSTM with a projection": lambda: _Recurrent(),
    "an adaptive softmax": lambda: _Around(_Tails()),
    "scripted": lambda: _Around(torch.jit.script(_mlp())),
    "scripted, in a list": lambda: _Around(_Loop()),
    "scripted, in blocks": lambda: _Around(nn.Sequential(_Block(), _Block())),
    "traced": lambda: _Around(_traced(_mlp())),
    "exported": lambda: _Around(_exported()),
    "a graph": lambda: _Around(fx.symbolic_trace(_mlp())),
    "a traced model": lambda: _traced(_Around(_mlp())),
}


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, LARGE, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.inp(x), x)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.lstm = nn.Linear(WIDTH, 64), nn.LSTM(64, 64, proj_size=32, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.inp(x))[0]


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.normal(2, 5, WIDTH)).square().mean()


def _plain(task: Task, setting: Setting, world: int) -> dict[str, torch.Tensor]:
    """The parameters after training in torch alone on the batches of all ranks; what is scripted can't be copied."""
    model = build(task)
    optimizer = setting.optimizer(model)
    for step in range(setting.steps):
        for rank in range(world):
            (task.loss(model, Batch(step, 0, rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _trains(rank: int, world: int, kind: str) -> None:
    task, setting = Task(KINDS[kind], _loss), Setting(steps=3, optimizer=sgd)
    expected = _plain(task, setting, world)
    for stage in range(4):
        outcome = train_sharded(task, setting.at(stage), rank)
        assert_close(outcome.parameters, expected, 1e-6, f"stage {stage}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_trains_as_unsharded_at_every_stage(kind: str) -> None:
    run_ranks(2, _trains, kind)


def _evaluates(rank: int, world: int) -> None:
    for layers in (1, 2):
        torch.manual_seed(0)
        model = _Around(_encoder(layers)).eval()
        x = torch.randn(2, 5, WIDTH)
        with torch.no_grad():
            expected = model(x)
            model, _ = zeroshard.shard(model, plan=3)
            torch.testing.assert_close(model(x), expected)


def test_the_fast_path_of_an_encoder_layer_finds_its_weights() -> None:
    run_ranks(2, _evaluates)


def _units(kind: str) -> list[str]:
    return [unit.name for unit in find_units(KINDS[kind]())]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_reads_its_children_is_a_unit_as_a_whole_and_what_takes_no_hooks_is_none() -> None:
    assert _units("attention") == ["", "inner.att"]
    assert _units("an encoder layer") == ["", "inner"]
    assert _units("parametrizations") == ["", "inner.0", "inner.2"]
    assert _units("an adaptive softmax") == [""]
    assert _units("scripted") == [""]
    assert _units("scripted, in blocks") == ["", "inner.0", "inner.1"]
    assert _units("traced") == ["", "inner"]
    assert _units("a graph") == ["", "inner.0", "inner.2"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "unit", "words"),
    [
        (
            "scripted",
            "inner",
            r"'inner' is a RecursiveScriptModule, which takes no hooks.*name the module that holds it",
        ),
        ("scripted", "inner.0", r"inner.0'.*takes no hooks"),
        ("attention", "inner.att.out_proj", r"'inner.att.out_proj' lies inside 'inner.att', a MultiheadAttention"),
    ],
)
def test_units_that_nothing_could_gather_are_refused(kind: str, unit: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        find_units(KINDS[kind](), [unit])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused_with_the_cure() -> None:
    model = torch.jit.script(_mlp())
    with pytest.raises(PlanError, match=r"RecursiveScriptModule.*nn\.Sequential\(model\)"):
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=2)
    zeroshard.initialize(
        model=nn.Sequential(model),
        config={"train_batch_size": 1, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}},
    )[0].destroy()


def _states(rank: int, world: int, directory: str) -> None:
    model = _Around(nn.Sequential(torch.jit.script(_mlp())))
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), plan=3)
    inner = model.get_submodule("inner")
    with pytest.raises(UsageError, match=r"state_dict\(\): parameter 'inner.0.0.weight' is sharded and empty"):
        inner.state_dict()
    with pytest.raises(UsageError, match=r"load_state_dict\(\): parameter .* is sharded and empty"):
        model.load_state_dict(expected)
    for name, value in zeroshard.full_state_dict(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    zeroshard.save(model, directory, "first")
    saved = full_parameters(model)
    _loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    zeroshard.load(model, directory)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, saved[name])
    zeroshard.close(model)
    with pytest.raises(UsageError, match=r"'0.0.weight' is sharded and empty"):
        inner.state_dict()
    with pytest.raises(UsageError, match=r"'0.0.weight' is sharded"):
        inner(torch.randn(2, 5, WIDTH))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_parameters_of_scripted_modules_are_saved_and_guarded_as_others(tmp_path: Path) -> None:
    run_ranks(2, _states, str(tmp_path))

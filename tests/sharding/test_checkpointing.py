"""What a config checkpoints, calls and blocks, keeps inputs only and gives the gradients of plain ones, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from tests.support.measure import saved_numel
from zeroshard import checkpointing
from zeroshard.config import load_config
from zeroshard.errors import ConfigError, UsageError
from zeroshard.sharding import activations

WIDE = 64
SECTION = "activation_checkpointing"


class Calls(nn.Module):
    """Blocks with dropout that its own forward calls, plainly or through `checkpoint`."""

    def __init__(self, *, through: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, WIDE), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDE, 8)) for _ in range(4)
        )
        self.through = through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x) if self.through else block(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def _nothing_configured() -> Iterator[None]:
    checkpointing.reset()
    yield
    checkpointing.reset()


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model(torch.randn(4, 8)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "settings",
    [{}, {"checkpoint_in_cpu": True}, {"synchronize": True, "profile": True}, {"partition_activations": True}],
    ids=str,
)
def test_checkpointed_calls_give_the_same_gradients(settings: dict[str, Any]) -> None:
    expected = _gradients(Calls(through=False))
    if settings:
        checkpointing.configure(num_checkpoints=4, **settings)
        assert checkpointing.is_configured()
    assert _equal(_gradients(Calls(through=True)), expected)


def test_checkpointed_calls_keep_their_inputs_only() -> None:
    through, plain = (Calls(through=way) for way in (True, False))
    inputs = torch.randn(4, 8, requires_grad=True)
    assert saved_numel(lambda: through(inputs)) <= 6 * 4 * 8 < saved_numel(lambda: plain(inputs)) / 8


def test_cpu_checkpointing_sends_the_inputs_to_the_host_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Size] = []

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor.shape)
        return tensor

    monkeypatch.setattr(activations, "_to_host", to_host)
    _gradients(Calls(through=True))
    assert not sent
    checkpointing.configure(deepspeed_config={SECTION: {"cpu_checkpointing": True}})
    _gradients(Calls(through=True))
    # Torch itself keeps a tensor without elements with each call, in some versions.
    assert {shape for shape in sent if shape.numel()} == {torch.Size((4, 8))}
    assert sum(shape.numel() > 0 for shape in sent) == 4


def test_profile_tells_of_each_run(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(profile=True)
    with caplog.at_level(logging.INFO, logger="zeroshard"):
        _gradients(Calls(through=True))
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("checkpoint: ")]
    assert sum("in the forward" in line for line in said) == 4
    assert sum("once more, in the backward" in line for line in said) == 4


def test_arguments_precede_the_config_and_wrong_values_are_refused() -> None:
    asked = {SECTION: {"cpu_checkpointing": True, "profile": True}, "whatever": {"is": "not read"}}
    checkpointing.configure(deepspeed_config=asked, profile=False)
    assert checkpointing._SETTINGS.get() == checkpointing.CallSettings(on_host=True)
    with pytest.raises(ConfigError, match="cpu_checkpointing"):
        checkpointing.configure(deepspeed_config={SECTION: {"cpu_checkpointing": "maybe"}})
    for name in ("checkpoint_in_cpu", "synchronize", "profile", "partition_activations", "contiguous_checkpointing"):
        with pytest.raises(UsageError, match=rf"configure\({name}=...\): True, False or None is needed, got 'no'"):
            checkpointing.configure(**{name: "no"})
    assert checkpointing._SETTINGS.get() == checkpointing.CallSettings(on_host=True), "nothing is taken over in part"
    with pytest.raises(UsageError, match="checkpoint: a function is needed, got 3"):
        checkpointing.checkpoint(3, torch.ones(1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        UsageError, match=r"contiguous_checkpointing=True\) needs num_checkpoints, the number of layers"
    ):
        checkpointing.configure(contiguous_checkpointing=True)
    counted = {SECTION: {"number_checkpoints": 4}}
    checkpointing.configure(deepspeed_config=counted, contiguous_checkpointing=True)
    with pytest.raises(UsageError, match="mpu_"):
        checkpointing.configure(mpu_=object())


@pytest.mark.parametrize(
    ("section", "chosen"),
    [
        ({}, []),
        ({"policy": "full"}, [0, 1, 2, 3]),
        ({"policy": "full", "number_checkpoints": 2, "cpu_checkpointing": True}, [0, 2]),
        ({"policy": "selective", "number_checkpoints": 3}, [0, 1, 2]),
    ],
    ids=str,
)
def test_a_config_checkpoints_blocks_and_trains_alike(section: dict[str, Any], chosen: list[int]) -> None:
    def trained(content: dict[str, Any]) -> tuple[list[torch.Tensor], list[int]]:
        model = Calls(through=False)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 1},
            SECTION: content,
        }
        engine, *_ = zeroshard.initialize(model=model, config=config)
        torch.manual_seed(1)
        for _ in range(2):
            engine.backward(engine(torch.randn(4, 8)))
            engine.step()
        engine.destroy()
        marked = [index for index, block in enumerate(model.blocks) if activations.is_checkpointed(block)]
        return [parameter.detach().clone() for parameter in model.parameters()], marked

    parameters, marked = trained(section)
    assert marked == chosen
    assert _equal(parameters, trained({})[0])


class Products(TorchDispatchMode):
    """Counts the products that are computed; one whose result was kept does not come here."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_the_selective_policy_computes_no_product_twice() -> None:
    def products(*, selective: bool) -> int:
        model = Calls(through=False)
        zeroshard.checkpoint_activations(model, selective=selective)
        loss = model(torch.randn(4, 8))
        with Products() as seen:
            loss.backward()
        return seen.count

    assert products(selective=True) == 0 < products(selective=False)


def test_partitioned_activations_are_taken_and_change_nothing() -> None:
    section = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 4}
    loaded = load_config({"train_batch_size": 2, SECTION: section}, world_size=1).activations
    assert loaded.policy == "calls"
    assert not loaded.on_host
